"""Where two runs part: the first operator of a step that gives something else, on both sides."""

from __future__ import annotations

from typing import NamedTuple

from torchtrim.records.trial import Trial


class Spot(NamedTuple):
    """An operator of a traced step, by name, module and line; empty for the end of the step."""

    op: str = ""
    module: str = ""
    path: str = ""
    line: int = 0
    phase: str = ""


class Parting(NamedTuple):
    """The first operators that differ, of the one and of the other run."""

    one: Spot
    other: Spot


def parting(one: Trial, other: Trial) -> Parting | None:
    """Where two traced steps part; None where all operators agree, or one was not traced."""
    if not one.digests or not other.digests:
        return None
    pairs = zip(_tokens(one), _tokens(other), strict=False)
    first = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
    if first is None:
        if len(one.digests) == len(other.digests):
            return None
        first = min(len(one.digests), len(other.digests))
    return Parting(_spot(one, first), _spot(other, first))


def _tokens(trial: Trial) -> list[tuple[str, str]]:
    assert trial.profile is not None
    names = (operator.name for operator in trial.profile.operators)
    return list(zip(names, trial.digests, strict=False))


def _spot(trial: Trial, number: int) -> Spot:
    profile = trial.profile
    assert profile is not None
    if number >= len(profile.operators):
        return Spot()
    operator = profile.operators[number]
    place = profile.place_of(number)
    path, line = (place.path, place.line) if place is not None else trial.lines[number]
    return Spot(operator.name, profile.module_of(number), path, line, operator.phase)
