"""Finds the recurrent layers of a profile."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from torchtrim.records.item_bytes import item_bytes
from torchtrim.records.profile import Profile, TensorUse
from torchtrim.records.remembered import remembered
from torchtrim.step.index import recorded_index
from torchtrim.step.step import Call, Span, Step

PIECE = 4
"""How many time steps are computed at once."""

_CELLS = {"LSTM": 1, "GRU": 0}
_GATES = {"LSTM": 4, "GRU": 3}
_SEQUENCE = 3
_HALVES = ("float16", "bfloat16")
_AROUND = 10
"""How many tensors of a state's size a time step makes on the way."""


class Recurrent(NamedTuple):
    """A call of a recurrent layer: its tasks, how many time steps all its layers and directions go, the bytes
    that are kept of it besides its input and its result, and those that a piece makes on the way, forward and
    backward. `result`: the tensor that it gives, where that itself is kept; -1 of two directions,
    which are joined."""

    span: Span
    turns: int
    kept_bytes: int
    within: tuple[int, int]
    result: int


def layers_of(step: Step) -> dict[str, tuple[Recurrent, ...]]:
    """The LSTMs and GRUs all of whose calls were given one tensor of three dimensions, without randomness."""
    return _layers_of(step.profile) if step.profile is not None else {}


@remembered
def _layers_of(profile: Profile) -> dict[str, tuple[Recurrent, ...]]:
    calls = recorded_index(profile).graded_calls
    found: dict[str, tuple[Recurrent, ...]] = {}
    for number, module in enumerate(profile.modules):
        if module.type not in _CELLS or not _is_plain(profile, module.path):
            continue
        seen = [_read(profile, call) for call in calls[number]]
        kept = tuple(one for one in seen if one is not None)
        if kept and len(kept) == len(seen):
            found[module.path] = kept
    return found


def _is_plain(profile: Profile, path: str) -> bool:
    """Whether it has the weights of a recurrent layer of torch, and no projections."""
    name = re.compile(rf"{re.escape(path)}\.(parametrizations\.)?(weight|bias)_(ih|hh)_l\d.*")
    has = any(name.fullmatch(one.name) for one in profile.storages)
    return has and not _has(profile, f"{path}.weight_hr_l0")


def _read(profile: Profile, call: Call) -> Recurrent | None:
    """A call, if one sequence goes in and one comes out, in the type of the weights."""
    operators = profile.operators[call.span.first : call.span.last]
    uses = [use for op in operators for use in (*op.inputs, *op.outputs)]
    given = [use for use in uses if use.storage in call.inputs[:1]]
    results = [one for one in uses if one.storage in call.outputs and len(one.shape) == _SEQUENCE]
    whole = max(results, key=lambda one: prod(one.shape), default=None)
    random = any(op.random for op in operators)
    if whole is None or random or not given or len(given[0].shape) != _SEQUENCE:
        return None
    module = profile.modules[call.module]
    if _is_cast(profile, module.path, uses):
        return None
    size, piece = item_bytes(whole.dtype), min(PIECE, whole.shape[0])
    steps, layers = whole.shape[0], _layers(profile, module.path)
    states = prod(whole.shape) * size
    both = _has(profile, f"{module.path}.weight_hh_l0_reverse")
    kept = states * ((layers - 1) * (1 + both) + layers * _CELLS[module.type] + both)
    one, entering = states // steps // (1 + both), piece * prod(given[0].shape) * size // steps
    gates = _GATES[module.type] * one
    forward = (piece + 2) * gates + _AROUND * one + entering
    backward = 2 * (piece + 1) * gates + (2 * piece + _AROUND) * one + 2 * entering
    between = states if layers > 1 else 0
    within = forward, backward + between
    result = -1 if both else whole.storage
    turns = steps * layers * (1 + both)
    return Recurrent(call.span, turns, kept, within, result)


def _is_cast(profile: Profile, path: str, uses: Sequence[TensorUse]) -> bool:
    """Whether something is of a lower precision than the weights, as under autocast."""
    own = {number for number, one in enumerate(profile.storages) if one.name.startswith(f"{path}.")}
    types = {use.dtype for use in uses}
    weights = {use.dtype for use in uses if use.storage in own}
    return bool(weights) and not types.isdisjoint(set(_HALVES) - weights)


def _has(profile: Profile, name: str) -> bool:
    return any(one.name == name for one in profile.storages)


def _layers(profile: Profile, path: str) -> int:
    """How many layers are on top of each other."""
    name = re.compile(rf"{re.escape(path)}\.weight_hh_l\d+")
    return max(1, len({one.name for one in profile.storages if name.fullmatch(one.name)}))
