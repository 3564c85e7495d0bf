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
    """Where two runs part in a step. `inputs`: the first input of a root, such as `"Net.0 (0)"`, where it
    differs. `spots`: the first operators that differ, of the one and of the other run."""

    inputs: str
    spots: tuple[Spot, Spot] | None


def parting(one: Trial, other: Trial, step: int) -> Parting:
    """Where two runs part in the step that was traced."""
    if step >= min(len(one.steps), len(other.steps)):
        return Parting("", None)
    given, taken = one.steps[step].inputs, other.steps[step].inputs
    inputs = next((name for name in given if taken.get(name, given[name]) != given[name]), "")
    if inputs and next(iter(given)) != inputs:
        inputs = ""
    return Parting(inputs, _spots(one, other))


def said_of(one: Spot, other: Spot) -> str:
    """What two operators that keep a gradient tell: whether one was there already."""
    pair = (one.op, other.op)
    if pair == ("aten::detach.default", "aten::add_.Tensor"):
        return ", which the other adds to one that was not cleared"
    if pair == ("aten::add_.Tensor", "aten::detach.default"):
        return ", which the other keeps alone, since it has cleared the one before"
    return ""


def _spots(one: Trial, other: Trial) -> tuple[Spot, Spot] | None:
    if not one.digests or not other.digests:
        return None
    pairs = zip(_tokens(one), _tokens(other), strict=False)
    first = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
    if first is None:
        if len(one.digests) == len(other.digests):
            return None
        first = min(len(one.digests), len(other.digests))
    return _spot(one, first), _spot(other, first)


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
    path, line, direct = trial.lines[number]
    place = profile.place_of(number)
    if place is not None and not direct:
        path, line = place.path, place.line
    return Spot(operator.name, profile.module_of(number), path, line, operator.phase)
