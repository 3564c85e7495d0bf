"""The largest batch that fits a budget, predicted by dry runs and then tried by real ones."""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec.structs import replace

from torchtrim.core.units import format_bytes
from torchtrim.core.words import first_line
from torchtrim.errors import ScriptFailed, UsageError
from torchtrim.planner.plans import rates_plan
from torchtrim.records.budget import MemoryKind, MemoryLimit, memory_limit
from torchtrim.records.estimate import GrowthLimit, LengthProbe
from torchtrim.records.report import Result
from torchtrim.records.terms import allowance
from torchtrim.records.trial import Request
from torchtrim.runner.script import Script, working_folder
from torchtrim.runner.trials import Model, Progress, Workload, run_trial
from torchtrim.techniques.scale_lr import lr_techniques
from torchtrim.workflows.estimate import Estimate, estimate_report
from torchtrim.workflows.optimize.trials import check_named, measured

PROBES = 4  # one for a good prediction, one beside it for proof, and two corrections
_TRUSTED = 0.25  # of the budget: a prediction off by more is not corrected by its error
_REQUEST = Request(steps=1)
_FAILURES = (ScriptFailed, RuntimeError, ValueError, IndexError, MemoryError)


def find_batch(
    workload: Workload | Callable[[], Model],
    memory: str | int,
    *,
    memory_kind: MemoryKind = "allocated",
    request: Request = _REQUEST,
    probes: int = PROBES,
    progress: Progress = lambda _: None,
) -> GrowthLimit:
    """See `torchtrim.find_batch`; `request`: the request of each run."""
    if probes < 1:
        raise UsageError(f"probes={probes}: at least one batch has to be tried.")
    limit = memory_limit(memory, memory_kind)
    estimate = Estimate(workload, memory_kind=memory_kind, progress=progress)
    return BatchSearch(estimate, limit, request, progress).run(probes)


def find_batch_report(
    script: Script,
    memory: str,
    request: Request = _REQUEST,
    *,
    memory_kind: MemoryKind = "allocated",
    allow: str = "BITWISE",
    progress: Progress = lambda _: None,
) -> Result:
    """Estimate a script, and find the largest batch of its loaders that runs in that memory.

    If `scale_lr` is allowed, also write a plan with the learning rates for that batch.
    """
    allowed = allowance(allow)
    check_named(allowed)
    limit = memory_limit(memory, memory_kind)

    def grown(estimate: Estimate) -> GrowthLimit:
        return BatchSearch(estimate, limit, request, progress).run(PROBES)

    dry = Request(steps=0, dry=True)
    result = estimate_report(script, dry, memory_kind=memory_kind, grown=grown, progress=progress)
    assert result.report.estimated is not None
    (growth,) = result.report.estimated.growth
    said = filter(None, (probe_note(growth), advice(growth)))
    report = replace(result.report, notes=(*result.report.notes, *said))
    result = result._replace(report=report)
    wanted = allowed.holds("SEMANTIC", "scale_lr") and growth.largest not in (0, growth.now)
    if not wanted or result.before is None:
        return result
    rates = lr_techniques(result.before, growth.now, growth.largest)
    return result._replace(plan=rates_plan(result.before, rates, growth, growth.budget_bytes))


class BatchSearch:
    """Search for the largest batch, by predictions corrected by real runs."""

    def __init__(
        self, estimate: Estimate, limit: MemoryLimit, request: Request, progress: Progress
    ) -> None:
        self._estimate = estimate
        self._request = request
        self._progress = progress
        self._budget = limit.budget(estimate.bytes_held).bytes
        self._now = 0
        self._predicted: dict[int, int | None] = {}
        self._tried: dict[int, LengthProbe] = {}
        self._reasons: dict[int, str] = {}

    def run(self, probes: int) -> GrowthLimit:
        """Search with at most this many runs; the answer is the largest batch that fitted, or 0."""
        predicted = self._at(self._budget)
        self._now = predicted.now
        batch = max(predicted.largest, 1)
        while len(self._tried) < probes and not self._is_proven:
            aim = self._aim(batch, self._probe(batch))
            low, high = self._low, self._high
            batch = max(low + 1, aim if high is None else min(aim, high - 1))
        return self._answer(predicted)

    def _aim(self, batch: int, error: int) -> int:
        """Return the batch that should fill the budget, by the prediction and its error.

        If the error is large, it is on the line through the present batch and the tried one.
        """
        if not error:
            return batch
        if abs(error) <= self._budget * _TRUSTED:
            return self._at(self._budget - error).largest
        peak, now = self._tried[batch].peak_bytes, self._now
        assert peak is not None
        if batch == now or peak == self._estimate.bytes_held:
            return batch
        each = (peak - self._estimate.bytes_held) / (batch - now)
        return batch + math.floor((self._budget - peak) / each) if each > 0 else batch

    @property
    def _low(self) -> int:
        return max((n for n, one in self._tried.items() if one.fits), default=0)

    @property
    def _high(self) -> int | None:
        too_large = (n for n, one in self._tried.items() if not one.fits and n > self._low)
        return min(too_large, default=None)

    @property
    def _is_proven(self) -> bool:
        return self._high == self._low + 1

    def _at(self, budget: int) -> GrowthLimit:
        grown = self._estimate.grown("batch", max(budget, 1))
        self._predicted[grown.largest] = grown.peak_bytes
        self._predicted[grown.largest + 1] = grown.next_bytes
        return grown

    def _probe(self, batch: int) -> int:
        predicted = self._predicted.get(batch)
        try:
            peak: int | None = self._measured(batch)
        except _FAILURES as error:
            self._reasons[batch] = f"{type(error).__name__}: {first_line(error)}"
            peak = None
        fits = peak is not None and peak <= self._budget
        self._tried[batch] = LengthProbe(
            length=batch, predicted_bytes=predicted, peak_bytes=peak, fits=fits
        )
        return peak - predicted if peak is not None and predicted is not None else 0

    def _measured(self, batch: int) -> int:
        estimate = self._estimate
        workload, fields = estimate.at("batch", batch)
        with working_folder() as folder:
            request = replace(self._request, **fields)
            tell = lambda text: self._progress(f"a batch of {batch}: {text}")  # noqa: E731
            trial = run_trial(workload, request, folder, tell)
        given = estimate.given_bytes(trial.profile, workload) if trial.profile is not None else 0
        return measured(trial, estimate.memory_kind) - given

    def _answer(self, predicted: GrowthLimit) -> GrowthLimit:
        low = self._low
        after = self._tried.get(low + 1)
        return replace(
            predicted,
            largest=low,
            peak_bytes=self._tried[low].peak_bytes if low else None,
            next_bytes=after.peak_bytes if after is not None else None,
            limited_by=self._reasons.get(low + 1, ""),
            probes=tuple(self._tried.values()),
            exact=self._is_proven,
        )


def advice(growth: GrowthLimit) -> str:
    """Return advice on the learning rate for another batch size; empty for the same size."""
    if growth.largest in (0, growth.now):
        return ""
    times = growth.largest / growth.now
    return (
        f"the batch is {times:.3g} times the former one: with SGD scale the learning rate by {times:.3g}, "
        f"with Adam by {times**0.5:.3g}, each over a warm-up of a few hundred steps (--allow "
        f"semantic=scale_lr writes a plan that does), or accumulate so that the effective batch stays "
        f"{growth.now}"
    )


def probe_note(growth: GrowthLimit) -> str:
    """Return a sentence on the batches that were run."""
    tried = ", ".join(
        f"{one.length} ({format_bytes(one.peak_bytes) if one.peak_bytes is not None else 'fails'})"
        for one in growth.probes
    )
    sure = "one more does not fit" if growth.exact else "larger ones were not tried"
    sure = sure if growth.largest else "not even one sample fits"
    return f"run at {tried}; {sure}"
