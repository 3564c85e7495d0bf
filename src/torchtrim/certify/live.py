"""The verdict on one step of a run that goes on, from copies that ran it planned and as it is."""

from __future__ import annotations

import tempfile
from pathlib import Path

from torchtrim.certify.certify import NOISE_FACTOR, ROUNDING_LIMIT, before_update, sample_of
from torchtrim.certify.compare import differences, largest_difference
from torchtrim.records.trial import Request, Step, Trial
from torchtrim.runner.live import Asked, Shadow, ShadowTask, StepVerdict

_AGAIN = "Check scripts whose step changes nothing outside before its optimizer has stepped"


def judge(asked: Asked, *, rounds: bool) -> StepVerdict:
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


def _trial(step: Step) -> Trial:
    return Trial(request=Request(), steps=[step])


def _closer(asked: Asked, one: Shadow, found: list[str], *, rounds: bool) -> StepVerdict:
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
