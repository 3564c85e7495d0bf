"""The loop: run, plan for a budget, run planned, correct the plan by what was measured, verify."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from torchtrim.certify.runs import Progress, Workload, run_trial
from torchtrim.certify.trial import Request, Trial
from torchtrim.certify.verify import Contest, certify
from torchtrim.errors import InfeasibleBudget, Unsupported
from torchtrim.observe.script import Script, working_folder
from torchtrim.planner.budget import Planner
from torchtrim.records.certificate import Certificate
from torchtrim.records.plan import MemoryKind, Plan
from torchtrim.techniques.fingerprint import sha256_of
from torchtrim.units import format_bytes, parse_bytes

_ROUNDS = 3
_WELL_USED = 0.9


class Fit(NamedTuple):
    """All that fitting a workload gave. `planned` and `certificate` are None where it fits already."""

    original: Trial
    budget_bytes: int
    plan: Plan
    planned: Trial | None
    certificate: Certificate | None
    notes: tuple[str, ...]


class Fitting:
    """Fits one workload. Every method runs it, and leaves nothing behind.

    The original is run once, and once more to compare it with itself, however many budgets are tried.
    `leave_out`: techniques that are not to be used.
    """

    def __init__(
        self,
        workload: Workload,
        request: Request,
        progress: Progress,
        leave_out: Collection[str] = (),
    ) -> None:
        self.workload = workload
        self._leave_out = leave_out
        self._request = request
        self._progress = progress
        self.original: Trial | None = None
        self._again: Trial | None = None

    def observe(self) -> Trial:
        """The original's trial."""
        if self.original is None:
            self.original = self._run(self._request, "original")
        return self.original

    def planner(self, original: Trial) -> Planner:
        """A planner for what was observed."""
        if original.profile is None:
            raise Unsupported(
                f"the script did only {len(original.steps)} steps, and the planner needs one after "
                f"{self._request.warmup} of warm-up. Let it run for more, or give --warmup 0."
            )
        path = self.workload.path if isinstance(self.workload, Script) else None
        return Planner(
            original.profile,
            step_seconds=original.seconds,
            fingerprint=original.fingerprint,
            script_sha256=sha256_of(path) if path else "",
            leave_out=self._leave_out,
        )

    def fit(self, memory: str | int, memory_kind: MemoryKind = "allocated") -> Fit:
        """Plan, apply, measure, correct; then verify. Raises `InfeasibleBudget` if nothing fits."""
        original = self.observe()
        planner = self.planner(original)
        whole = measured(original, memory_kind)
        budget = parse_bytes(memory, whole=whole)
        if whole <= budget:
            bias = whole - planner.simulated_original
            plan = planner.plan(budget, bias=bias, memory_kind=memory_kind)
            return Fit(
                original, budget, plan, None, None, ("the original fits the budget as it is",)
            )
        plan, planned, notes = self._within(planner, original, budget, memory_kind)
        certificate = self.verify(original, plan, planned)
        return Fit(original, budget, plan, planned, certificate, notes)

    def smallest(self) -> Fit:
        """The plan with the smallest peak that was found, measured and verified."""
        original = self.observe()
        planner = self.planner(original)
        bias = original.peak_bytes - planner.simulated_original
        plan = planner.floor_plan(original.peak_bytes, bias=bias)
        planned = self.run_planned(plan)
        certificate = self.verify(original, plan, planned)
        return Fit(original, original.peak_bytes, plan, planned, certificate, ())

    def verify(self, original: Trial, plan: Plan, planned: Trial | None = None) -> Certificate:
        """Run the original again and, unless it was, the planned; compare."""
        if self._again is None:
            self._again = self._run(self._request, "original again")
        request = msgspec.structs.replace(self._request, plan=plan)
        if planned is None:
            planned = self._run(request, "planned")
        contest = Contest(self.workload, self.workload, self._request, request)
        return certify(contest, original, self._again, planned, self._progress)

    def run_planned(self, plan: Plan) -> Trial:
        """Run it planned."""
        return self._run(msgspec.structs.replace(self._request, plan=plan), "planned")

    def _within(
        self, planner: Planner, original: Trial, budget: int, kind: MemoryKind
    ) -> tuple[Plan, Trial, tuple[str, ...]]:
        """A plan whose measured figure is within the budget, and its trial."""
        bias = measured(original, kind) - planner.simulated_original
        best: tuple[Plan, Trial] | None = None
        notes: list[str] = []
        for _ in range(_ROUNDS):
            try:
                plan = planner.plan(budget, bias=bias, memory_kind=kind)
            except InfeasibleBudget:
                break
            trial = self.run_planned(plan)
            used = measured(trial, kind)
            error = used - plan.predicted.peak_bytes
            if used <= budget:
                better = best is None or used > measured(best[1], kind)
                best = (plan, trial) if better else best
                if used >= _WELL_USED * budget or error > -0.02 * budget:
                    break
            else:
                notes.append(
                    f"a plan predicted {format_bytes(plan.predicted.peak_bytes)} and measured "
                    f"{format_bytes(used)}; planned again"
                )
            bias += error
        if best is not None:
            return *best, tuple(notes)
        return self._at_floor(planner, budget, bias, kind, tuple(notes))

    def _at_floor(
        self, planner: Planner, budget: int, bias: int, kind: MemoryKind, notes: tuple[str, ...]
    ) -> tuple[Plan, Trial, tuple[str, ...]]:
        """The plan with the smallest peak, if what it measures is within the budget after all."""
        plan = planner.floor_plan(budget, bias=bias, memory_kind=kind)
        trial = self.run_planned(plan)
        used = measured(trial, kind)
        if used <= budget:
            return plan, trial, notes
        raise planner.infeasible(budget, used)

    def _run(self, request: Request, what: str) -> Trial:
        with self._folder() as folder:
            return run_trial(
                self.workload, request, folder, lambda text: self._progress(f"{what}: {text}")
            )

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        with working_folder() as folder:
            yield folder


def measured(trial: Trial, kind: MemoryKind) -> int:
    """The trial's figure of that kind of memory. Raises `Unsupported` where it was not measured."""
    figure = {
        "allocated": trial.peak_bytes,
        "reserved": max((step.reserved_bytes or 0 for step in trial.steps), default=0),
        "rss": trial.rss_bytes or 0,
    }[kind]
    if not figure:
        raise Unsupported(
            f"--memory-kind {kind}: it is not measured on {trial.device}. "
            "`allocated` is measured everywhere, `reserved` on CUDA, `rss` on CPU."
        )
    return figure
