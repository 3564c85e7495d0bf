"""A plan that makes another function since it was asked to: all else is compared with that by hand."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from torchtrim.certify.certify import (
    NOISE_FACTOR,
    ROUNDING_LIMIT,
    Contest,
    Jobs,
    before_update,
    certify,
    sample_of,
)
from torchtrim.certify.compare import differences, largest_difference
from torchtrim.core.isolation import isolated
from torchtrim.executor.registry import Replaces, technique
from torchtrim.records.certificate import Certificate, Coverage, SemanticChange, Verdict
from torchtrim.records.plan import Plan, Technique
from torchtrim.records.trial import Request, Trial, TrialStep
from torchtrim.runner.live import RunShadow, Shadow, ShadowTask, StepVerdict
from torchtrim.runner.script import Script, working_folder
from torchtrim.runner.trials import Progress, Workload

_COARSE = ("precision", "low_bit_states", "compress_gradients")
_COARSE_LIMIT = 0.5
"""The largest difference that may be rounding where a program computes in half precision, or keeps 8 bits:
bfloat16 has 8 bits, 2**16 times fewer than float32. Whether it is rounding float64 says."""


def asked_of(plan: Plan) -> tuple[Technique, ...]:
    """The techniques of a plan that make another function."""
    return tuple(one for one in plan.techniques if one.equivalence == "SEMANTIC")


def limit_of(plan: Plan) -> float:
    """Above it no difference from the program with its replacement made by hand is taken for rounding."""
    coarse = any(one.name in _COARSE for one in asked_of(plan))
    return _COARSE_LIMIT if coarse else ROUNDING_LIMIT


def by_hand(request: Request, plan: Plan) -> Request:
    """The request for the original in which a person made the same replacement, and nothing else."""
    alone = msgspec.structs.replace(plan, techniques=asked_of(plan))
    return msgspec.structs.replace(request, plan=alone, by_hand=True, exported="")


def as_asked(found: Certificate, plan: Plan, original: Trial, planned: Trial) -> Certificate:
    """The certificate of a plan from that against the original with its replacement made by hand."""
    names = tuple(dict.fromkeys(one.name for one in asked_of(plan)))
    made = " and ".join(names)
    if found.verdict not in ("BITWISE", "ROUNDING"):
        reason = f"compared with the original in which {made} was made by hand: {found.reason}"
        return msgspec.structs.replace(found, reason=reason)
    mine, others = losses_of(planned), losses_of(original)
    asked = SemanticChange(
        techniques=names,
        others="BITWISE" if found.verdict == "BITWISE" else "ROUNDING",
        losses=mine,
        original_losses=others,
        largest_difference=_apart(mine, others),
    )
    equal = _EQUAL[asked.others]
    reason = f"{made} was asked for; all else is {equal} that of the original with it made by hand"
    said = "; ".join((reason, loss_sentence(asked), *_advice(plan)))
    return msgspec.structs.replace(found, verdict="AS ASKED", asked=asked, reason=said)


def _advice(plan: Plan) -> Iterator[str]:
    for one in asked_of(plan):
        with isolated("technique", one.name):
            unit = technique(one.name)
            if isinstance(unit, Replaces) and (said := unit.advice(one)):
                yield said


_EQUAL = {"BITWISE": "bit for bit", "ROUNDING": "up to rounding"}


def losses_of(trial: Trial) -> tuple[float | None, ...]:
    """The last loss of each compared step that had one."""
    return tuple(step.losses[-1] for step in trial.steps if step.losses)


def loss_sentence(asked: SemanticChange) -> str:
    """What the replacement does to the loss, in a sentence."""
    pairs = list(zip(asked.original_losses, asked.losses, strict=False))
    if not pairs:
        return "no loss was seen"
    (first, _), (last, now) = pairs[0], pairs[-1]
    steps = f"after {len(pairs)} step{'' if len(pairs) == 1 else 's'}"
    if last is None or now is None or first is None or asked.largest_difference is None:
        return f"the loss is not finite {steps}: {_figure(now)} where the original's is {_figure(last)}"
    return (
        f"the loss {steps} is {_figure(now)} where the original's is {_figure(last)}, which began at "
        f"{_figure(first)}; they differ by {asked.largest_difference:.1e} at most"
    )


def _figure(loss: float | None) -> str:
    return "none" if loss is None else f"{loss:.6g}"


def _apart(mine: Sequence[float | None], others: Sequence[float | None]) -> float | None:
    """The largest difference, relative to the largest of the original's."""
    pairs = [(a, b) for a, b in zip(mine, others, strict=False) if a is not None and b is not None]
    if not pairs or len(pairs) < max(len(mine), len(others)):
        return None
    scale = max(abs(b) for _, b in pairs)
    found = max(abs(a - b) for a, b in pairs) / scale if scale else 0.0
    return found if math.isfinite(found) else None


_ORDER: tuple[Verdict, ...] = ("BITWISE", "ROUNDING", "UNDECIDED", "NOT EQUAL")


def certify_ranks(
    contest: Contest, original: Trial, planned: Trial, progress: Progress
) -> Certificate:
    """The verdict on a planned trial: of its only process, or the worst of its ranks.

    Where a rank differs, the whole job runs again, once for all ranks, since they await each other.
    """
    if not original.ranks:
        return certify(contest, original, planned, progress)
    pairs = zip(original.ranks, planned.ranks, strict=True)
    with working_folder() as folder:
        contest = contest._replace(jobs=Jobs(folder))
        return _together(
            [
                certify(_of_rank(contest, number), one, other, progress)
                for number, (one, other) in enumerate(pairs)
            ]
        )


def _of_rank(contest: Contest, number: int) -> Contest:
    return contest._replace(
        original=_only(contest.original, number), planned=_only(contest.planned, number)
    )


def _only(workload: Workload, number: int) -> Workload:
    return workload._replace(only=number) if isinstance(workload, Script) else workload


def _together(each: Sequence[Certificate]) -> Certificate:
    """The certificate of the rank with the worst verdict, which names all of them."""
    worst = max(each, key=lambda one: _ORDER.index(one.verdict))
    number = each.index(worst)
    count = len(each)
    equal = worst.verdict == "BITWISE"
    return replace(
        worst,
        compared=tuple(f"{one} on each of {count} ranks" for one in worst.compared[:1])
        + worst.compared[1:],
        reason=f"on each of {count} ranks {worst.reason}"
        if equal
        else f"rank {number}: {worst.reason}",
        largest_difference=_largest(one.largest_difference for one in each),
        noise=_largest(one.noise for one in each),
        coverage=_covered([one.coverage for one in each if one.coverage is not None]),
    )


def _largest(figures: Iterable[float | None]) -> float | None:
    """The largest, None where one was not measured."""
    known = [*figures]
    measured = [one for one in known if one is not None]
    return max(measured) if len(measured) == len(known) else None


def _covered(each: Sequence[Coverage]) -> Coverage | None:
    """What was shown on any of the ranks, and which they are."""
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
    )


_AGAIN = "Check scripts whose step changes nothing outside before its optimizer has stepped"


def judge(asked: RunShadow, *, rounds: bool) -> StepVerdict:
    """Whether the step is the same with the plan and without. `rounds`: the plan may round otherwise."""
    one, other = asked(ShadowTask(planned=False)), asked(ShadowTask(planned=True))
    if one is None or other is None:
        return StepVerdict("unchecked", "not checked: the copy that ran it died or took too long")
    verdict = _unrepeatable(one, other) or _failed(one, other)
    if verdict is None:
        found = _labels(one, other)
        verdict = _closer(asked, one, found, rounds=rounds) if found else _equal(one)
    return verdict._replace(bytes=max(one.bytes, other.bytes, verdict.bytes))


def _equal(one: Shadow) -> StepVerdict:
    return StepVerdict("equal", f"equals the original, every bit of {len(one.step.digests)} values")


def _unrepeatable(one: Shadow, other: Shadow) -> StepVerdict | None:
    """What is said of a step that does more than compute."""
    effect = one.effect or other.effect
    if not effect:
        return None
    why = f"not checked: the step {effect}, and cannot be run a second time. {_AGAIN}."
    return StepVerdict("unchecked", why)


def _failed(one: Shadow, other: Shadow) -> StepVerdict | None:
    if not one.failed and not other.failed:
        return None
    kinds = [failed.partition(":")[0] for failed in (one.failed, other.failed)]
    if kinds[0] == kinds[1]:
        return StepVerdict("equal", f"fails as the original does: {one.failed}")
    if one.failed:
        return StepVerdict(
            "different", f"the original fails, and the planned step does not: {one.failed}"
        )
    return StepVerdict(
        "different", f"the original runs, and the planned step fails: {other.failed}"
    )


def _labels(one: Shadow, other: Shadow) -> list[str]:
    return differences(_trial(one.step), _trial(other.step))


def _trial(step: TrialStep) -> Trial:
    return Trial(request=Request(), steps=[step])


def _closer(asked: RunShadow, one: Shadow, found: list[str], *, rounds: bool) -> StepVerdict:
    """By how much the planned step differs, where rounding or the original itself may explain it."""
    again = asked(ShadowTask(planned=False))
    noise = _labels(one, again) if again is not None else []
    first = found[0].partition("/")[2]
    if not noise and not rounds:
        return StepVerdict("different", f"differs from the original, first in {first}")
    names = tuple(name.partition("/")[2] for name in sample_of(list(dict.fromkeys(found + noise))))
    with tempfile.TemporaryDirectory(prefix="torchtrim-") as folder:
        places = [Path(folder, name) for name in ("one", "again", "planned")]
        for place, planned in zip(places, (False, False, True), strict=True):
            place.mkdir()
            if asked(ShadowTask(planned, names, place)) is None:
                return StepVerdict(
                    "unchecked", "not checked: a copy that ran it died or took too long"
                )
        own = largest_difference(places[0], places[1], names) if noise else 0.0
        early = tuple(
            label.partition("/")[2] for label in before_update([f"0/{name}" for name in names])
        )
        gap = largest_difference(places[0], places[2], early if rounds else names)
    limit = max(NOISE_FACTOR * own, ROUNDING_LIMIT if rounds else 0.0)
    if gap <= limit:
        why = "as two runs of the original do" if noise else "as rounding does"
        return StepVerdict("equal", f"differs by {gap:.1e}, {why}")
    return StepVerdict("different", f"differs by {gap:.1e} from the original, first in {first}")
