"""Verdicts on plans that change the function on request, on jobs of several ranks, and on steps of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from msgspec.structs import replace

from torchtrim.certify.certify import NOISE_FACTOR, certify
from torchtrim.certify.compare import (
    before_update,
    difference,
    differences,
    largest_difference,
    sample_of,
    wide,
)
from torchtrim.certify.contest import ROUNDING_LIMIT, Contest, Jobs
from torchtrim.core.isolation import isolated
from torchtrim.executor.registry import Replaces, technique
from torchtrim.records.certificate import Certificate, Coverage, SemanticChange, Verdict
from torchtrim.records.plan import Plan, Technique
from torchtrim.records.trial import Request, Trial
from torchtrim.runner.live import RunShadow, Shadow, ShadowTask, StepVerdict
from torchtrim.runner.regions import RegionResult
from torchtrim.runner.script import Script, working_folder
from torchtrim.runner.trials import Progress, Workload

_COARSE = ("precision", "low_bit_states", "compress_gradients")
_COARSE_LIMIT = 0.5  # bfloat16 and 8-bit states have 2**16 times fewer values than float32


def asked_of(plan: Plan) -> tuple[Technique, ...]:
    """Return the techniques of a plan that change the function."""
    return tuple(one for one in plan.techniques if one.equivalence == "SEMANTIC")


def limit_of(plan: Plan) -> float:
    """Return the largest difference that is believed to be rounding, from the change made by hand."""
    coarse = any(one.name in _COARSE for one in asked_of(plan))
    return _COARSE_LIMIT if coarse else ROUNDING_LIMIT


def by_hand(request: Request, plan: Plan) -> Request:
    """Return a request for the original, changed by hand as the plan changes its function."""
    return replace(
        request, plan=replace(plan, techniques=asked_of(plan)), by_hand=True, exported=""
    )


def as_asked(found: Certificate, plan: Plan, original: Trial, planned: Trial) -> Certificate:
    """Return a plan's certificate, given its certificate against the original changed by hand."""
    names = tuple(dict.fromkeys(one.name for one in asked_of(plan)))
    changes = " and ".join(names)
    if found.verdict not in ("BITWISE", "ROUNDING"):
        reason = f"compared with the original with {changes} made by hand: {found.reason}"
        return replace(found, reason=reason)
    mine, others = _losses_of(planned), _losses_of(original)
    asked = SemanticChange(
        techniques=names,
        others="BITWISE" if found.verdict == "BITWISE" else "ROUNDING",
        losses=mine,
        original_losses=others,
        largest_difference=_apart(mine, others),
    )
    equal = "bit for bit" if found.verdict == "BITWISE" else "up to rounding"
    reason = f"{changes} was requested; all else equals the original with it made by hand, {equal}"
    said = "; ".join((reason, _loss_sentence(asked), *_advice(plan)))
    return replace(found, verdict="AS ASKED", asked=asked, reason=said)


def _advice(plan: Plan) -> Iterator[str]:
    for one in asked_of(plan):
        with isolated("technique", one.name):
            unit = technique(one.name)
            if isinstance(unit, Replaces) and (said := unit.advice(one)):
                yield said


def _losses_of(trial: Trial) -> tuple[float | None, ...]:
    return tuple(step.losses[-1] for step in trial.steps if step.losses)


def _loss_sentence(asked: SemanticChange) -> str:
    pairs = list(zip(asked.original_losses, asked.losses, strict=False))
    if not pairs:
        return "no step had a loss"
    first, last, now = (
        "none" if loss is None else f"{loss:.6g}" for loss in (pairs[0][0], *pairs[-1])
    )
    steps = f"after {len(pairs)} step{'' if len(pairs) == 1 else 's'}"
    if None in (pairs[0][0], *pairs[-1], asked.largest_difference):
        return f"the loss is not finite {steps}: {now} where the original's is {last}"
    return (
        f"the loss {steps} is {now} where the original's is {last}, which began at {first}; they differ "
        f"by {asked.largest_difference:.1e} at most"
    )


def _apart(mine: Sequence[float | None], others: Sequence[float | None]) -> float | None:
    """Return the largest difference, relative to the original's largest loss."""
    pairs = [(a, b) for a, b in zip(mine, others, strict=False) if a is not None and b is not None]
    if not pairs or len(pairs) < max(len(mine), len(others)):
        return None
    scale = max(abs(b) for _, b in pairs)
    apart = max(abs(a - b) for a, b in pairs) / scale if scale else 0.0
    return apart if math.isfinite(apart) else None


_ORDER: tuple[Verdict, ...] = ("BITWISE", "ROUNDING", "UNDECIDED", "NOT EQUAL")


def certify_ranks(
    contest: Contest, original: Trial, planned: Trial, progress: Progress
) -> Certificate:
    """Return the verdict on a planned trial: of its only process, or the worst of its ranks.

    If a rank differs, the whole job runs again, once for all ranks, since they await each other.
    """
    if not original.ranks:
        return certify(contest, original, planned, progress)
    with working_folder() as folder:
        jobs, certificates = Jobs(folder), []
        for number, pair in enumerate(zip(original.ranks, planned.ranks, strict=True)):
            workloads = (_only(contest.original, number), _only(contest.planned, number))
            rank = contest._replace(original=workloads[0], planned=workloads[1], jobs=jobs)
            certificates.append(certify(rank, *pair, progress))
        return _together(certificates)


def _only(workload: Workload, number: int) -> Workload:
    return workload._replace(only=number) if isinstance(workload, Script) else workload


def _together(each: Sequence[Certificate]) -> Certificate:
    worst = max(each, key=lambda one: _ORDER.index(one.verdict))
    ranks = f"on each of {len(each)} ranks"
    where = ranks if worst.verdict == "BITWISE" else f"rank {each.index(worst)}:"
    return replace(
        worst,
        compared=(*(f"{one} {ranks}" for one in worst.compared[:1]), *worst.compared[1:]),
        reason=f"{where} {worst.reason}",
        largest_difference=_largest([one.largest_difference for one in each]),
        noise=_largest([one.noise for one in each]),
        coverage=_covered([one.coverage for one in each if one.coverage is not None]),
    )


def _largest(figures: Sequence[float | None]) -> float | None:
    measured = [figure for figure in figures if figure is not None]
    return max(measured) if len(measured) == len(figures) else None


def _covered(each: Sequence[Coverage]) -> Coverage | None:
    if not each:
        return None
    return replace(
        each[0],
        inputs=tuple(dict.fromkeys(one for part in each for one in part.inputs)),
        dtypes=tuple(sorted({one for part in each for one in part.dtypes})),
        batch_sizes=tuple(sorted({one for part in each for one in part.batch_sizes})),
        dimensions=tuple(sorted({one for part in each for one in part.dimensions})),
        modes=tuple(dict.fromkeys(one for part in each for one in part.modes)),
        processes=tuple(one for part in each for one in part.processes),
        complete=all(part.complete for part in each),
    )


_AGAIN = "Check scripts whose step changes nothing outside before its optimizer has stepped"
_DIED = "not checked: the copy that ran it died or took too long"


def judge(run: RunShadow, *, rounds: bool) -> StepVerdict:
    """Compare the step with the plan to the step without. `rounds`: the plan may round otherwise."""
    one, other = run(ShadowTask(planned=False)), run(ShadowTask(planned=True))
    if one is None or other is None:
        return StepVerdict("unchecked", _DIED)
    if effect := one.effect or other.effect:
        why = f"not checked: the step {effect}, and cannot be run a second time. {_AGAIN}."
        verdict = StepVerdict("unchecked", why)
    elif one.failed or other.failed:
        verdict = _failed(one.failed, other.failed)
    elif labels := _labels(one, other):
        verdict = _closer(run, one, labels, rounds=rounds)
    else:
        values = f"every bit of {len(one.step.digests)} values"
        verdict = StepVerdict("equal", f"equals the original, {values}")
    return verdict._replace(bytes=max(one.bytes, other.bytes, verdict.bytes))


def judge_region(found: RegionResult, *, rounds: bool) -> StepVerdict:
    """Compare a region of a planned step with the same call without the plan."""
    values = [one for pair in found.pairs.values() for one in pair if isinstance(one, torch.Tensor)]
    size = sum(one.numel() * one.element_size() for one in values)
    most = 0.0
    for name, (one, other) in found.pairs.items():
        share = _share(one, other)
        most = max(most, share)
        exact = not rounds or name.startswith(("attribute", "random"))
        if share > (0.0 if exact else ROUNDING_LIMIT):
            why = f"differs from the original in {found.name}, first in {name}, by {share:.1e}"
            return StepVerdict("different", why, size)
    if most:
        why = f"{found.name} differs by {most:.1e}, as rounding does"
        return StepVerdict("equal", why, size)
    why = f"{found.name} equals the original, every bit of {len(found.pairs)} values"
    return StepVerdict("equal", why, size)


def _share(one: Any, other: Any) -> float:
    """Return the difference, relative to the largest number; inf if a value is not a number."""
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return 0.0 if one == other else math.inf
    gap, scale = difference(wide(one), wide(other))
    return gap / scale if gap else 0.0


def _failed(one: str, other: str) -> StepVerdict:
    if one.partition(":")[0] == other.partition(":")[0]:
        return StepVerdict("equal", f"fails as the original does: {one}")
    if one:
        return StepVerdict("different", f"the original fails, and the planned step does not: {one}")
    return StepVerdict("different", f"the original runs, and the planned step fails: {other}")


def _labels(one: Shadow, other: Shadow) -> list[str]:
    return differences(*(Trial(request=Request(), steps=[part.step]) for part in (one, other)))


def _closer(run: RunShadow, one: Shadow, found: list[str], *, rounds: bool) -> StepVerdict:
    """Measure the planned step's difference, which rounding or the original's own noise may explain."""
    again = run(ShadowTask(planned=False))
    noise = _labels(one, again) if again is not None else []
    first = found[0].partition("/")[2]
    if not noise and not rounds:
        return StepVerdict("different", f"differs from the original, first in {first}")
    labels = sample_of(list(dict.fromkeys(found + noise)))
    names = tuple(label.partition("/")[2] for label in labels)
    with working_folder() as folder:
        places = [folder / name for name in ("one", "again", "planned")]
        for place, planned in zip(places, (False, False, True), strict=True):
            place.mkdir()
            if run(ShadowTask(planned, names, place)) is None:
                return StepVerdict("unchecked", _DIED)
        own = largest_difference(places[0], places[1], names) if noise else 0.0
        early = tuple(label.partition("/")[2] for label in before_update(labels))
        gap = largest_difference(places[0], places[2], early if rounds else names)
    limit = max(NOISE_FACTOR * own, ROUNDING_LIMIT if rounds else 0.0)
    if gap <= limit:
        why = "as two runs of the original do" if noise else "as rounding does"
        return StepVerdict("equal", f"differs by {gap:.1e}, {why}")
    return StepVerdict("different", f"differs by {gap:.1e} from the original, first in {first}")
