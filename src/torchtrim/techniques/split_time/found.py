"""Finds the recurrent layers of a profile."""

from __future__ import annotations

import re
from collections import defaultdict
from math import prod
from typing import NamedTuple

from torchtrim.records.profile import Call, Profile
from torchtrim.records.remembered import remembered
from torchtrim.step.step import Span, Step

PIECE = 4
"""How many time steps are computed at once."""

_CELLS = {"LSTM": 1, "GRU": 0}
_GATES = {"LSTM": 4, "GRU": 3}
_SEQUENCE = 3
_DOUBLE = "float64"
_AROUND = 10
"""How many tensors of a state's size a time step makes on the way."""


class Recurrent(NamedTuple):
    """A call of a recurrent layer: its tasks, how many pieces of time it has, the bytes that are kept of it
    besides its input and its result, and those that a piece makes on the way, forward and backward.
    `result`: the tensor that it gives, where that itself is kept; -1 of two directions, which are joined."""

    span: Span
    pieces: int
    kept_bytes: int
    within: tuple[int, int]
    result: int


def layers_of(step: Step) -> dict[str, tuple[Recurrent, ...]]:
    """The LSTMs and GRUs all of whose calls were given one tensor of three dimensions, without randomness."""
    return _layers_of(step.profile) if step.profile is not None else {}


@remembered
def _layers_of(profile: Profile) -> dict[str, tuple[Recurrent, ...]]:
    calls: defaultdict[int, list[Call]] = defaultdict(list)
    for call in profile.calls:
        if call.graded and call.last > call.first:
            calls[call.module].append(call)
    found: dict[str, tuple[Recurrent, ...]] = {}
    for number, module in enumerate(profile.modules):
        if module.type not in _CELLS:
            continue
        seen = [_read(profile, call) for call in calls[number]]
        kept = tuple(one for one in seen if one is not None)
        if kept and len(kept) == len(seen):
            found[module.path] = kept
    return found


def _read(profile: Profile, call: Call) -> Recurrent | None:
    """A call, if one sequence goes in and one comes out."""
    operators = profile.operators[call.first : call.last]
    uses = [use for op in operators for use in (*op.inputs, *op.outputs)]
    given = [use for use in uses if use.storage in call.inputs[:1]]
    results = [one for one in uses if one.storage in call.outputs and len(one.shape) == _SEQUENCE]
    whole = max(results, key=lambda one: prod(one.shape), default=None)
    random = any(op.random for op in operators)
    if whole is None or random or not given or len(given[0].shape) != _SEQUENCE:
        return None
    module = profile.modules[call.module]
    steps, size = whole.shape[0], 8 if whole.dtype == _DOUBLE else 4
    layers, states = _layers(profile, module.path), prod(whole.shape) * size
    both = _has(profile, f"{module.path}.weight_hh_l0_reverse")
    kept = states * ((layers - 1) * (1 + both) + layers * _CELLS[module.type] + both)
    one, entering = states // steps // (1 + both), PIECE * prod(given[0].shape) * size // steps
    gates = _GATES[module.type] * one
    forward = (PIECE + 2) * gates + _AROUND * one + entering
    backward = 2 * (PIECE + 1) * gates + (2 * PIECE + _AROUND) * one + 2 * entering
    between = states if layers > 1 else 0
    within = forward, backward + between
    result = -1 if both else whole.storage
    return Recurrent(Span(call.first, call.last), -(-steps // PIECE), kept, within, result)


def _has(profile: Profile, name: str) -> bool:
    return any(one.name == name for one in profile.storages)


def _layers(profile: Profile, path: str) -> int:
    """How many layers are on top of each other."""
    name = re.compile(rf"{re.escape(path)}\.weight_hh_l\d+")
    return max(1, len({one.name for one in profile.storages if name.fullmatch(one.name)}))
