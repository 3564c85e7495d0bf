"""Finds the recurrent layers of a profile."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from torchtrim.records.operator_names import item_bytes
from torchtrim.records.profile import Profile, TensorUse
from torchtrim.records.remembered import remembered
from torchtrim.step.index import recorded_index
from torchtrim.step.step import Span, Step, StepCall

PIECE = 4  # Arbitrary; time steps computed at once.

_CELLS = {"LSTM": 1, "GRU": 0}  # numbers of cell states
_GATES = {"LSTM": 4, "GRU": 3}
_SEQUENCE = 3  # dimensions of a batch of sequences
_HALVES = ("float16", "bfloat16")
_TEMPORARIES = 10  # temporaries of a state's size in a time step


class RecurrentCall(NamedTuple):
    """A call of a recurrent layer: its tasks, and `turns`, the time steps over all its layers and directions.

    `kept_bytes`: bytes kept in addition to its input and its result. `within`: temporaries of a piece,
    forward and backward. `result`: its output tensor if that itself is kept, or -1 for two directions, which
    are concatenated.
    """

    span: Span
    turns: int
    kept_bytes: int
    within: tuple[int, int]
    result: int


def layers_of(step: Step) -> dict[str, tuple[RecurrentCall, ...]]:
    """Return the LSTMs and GRUs that take one tensor of three dimensions and draw no random numbers."""
    return _layers_of(step.profile) if step.profile is not None else {}


@remembered
def _layers_of(profile: Profile) -> dict[str, tuple[RecurrentCall, ...]]:
    calls = recorded_index(profile).graded_calls
    found: dict[str, tuple[RecurrentCall, ...]] = {}
    for number, module in enumerate(profile.modules):
        if module.type in _CELLS and _is_supported(profile, module.path):
            known = tuple(filter(None, (_recurrent_call(profile, one) for one in calls[number])))
            if known and len(known) == len(calls[number]):
                found[module.path] = known
    return found


def _is_supported(profile: Profile, path: str) -> bool:
    """Return True if a module has the weights of torch's recurrent layers, and no projections."""
    name = re.compile(rf"{re.escape(path)}\.(parametrizations\.)?(weight|bias)_(ih|hh)_l\d.*")
    has = any(name.fullmatch(one.name) for one in profile.storages)
    return has and not _has(profile, f"{path}.weight_hr_l0")


def _recurrent_call(profile: Profile, call: StepCall) -> RecurrentCall | None:
    """Return a call if it takes and returns one sequence in the type of the weights."""
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
    steps, layers = whole.shape[0], _stacked_layers(profile, module.path)
    states = prod(whole.shape) * size
    both = _has(profile, f"{module.path}.weight_hh_l0_reverse")
    kept = states * ((layers - 1) * (1 + both) + layers * _CELLS[module.type] + both)
    one, entering = states // steps // (1 + both), piece * prod(given[0].shape) * size // steps
    gates = _GATES[module.type] * one
    forward = (piece + 2) * gates + _TEMPORARIES * one + entering
    backward = 2 * (piece + 1) * gates + (2 * piece + _TEMPORARIES) * one + 2 * entering
    within = forward, backward + (states if layers > 1 else 0)
    result = -1 if both else whole.storage
    return RecurrentCall(call.span, steps * layers * (1 + both), kept, within, result)


def _is_cast(profile: Profile, path: str, uses: Sequence[TensorUse]) -> bool:
    """Return True if any tensor has a lower precision than the weights, as under autocast."""
    own = {number for number, one in enumerate(profile.storages) if one.name.startswith(f"{path}.")}
    types = {use.dtype for use in uses}
    weights = {use.dtype for use in uses if use.storage in own}
    return bool(weights) and not types.isdisjoint(set(_HALVES) - weights)


def _has(profile: Profile, name: str) -> bool:
    return any(one.name == name for one in profile.storages)


def _stacked_layers(profile: Profile, path: str) -> int:
    name = re.compile(rf"{re.escape(path)}\.weight_hh_l\d+")
    return max(1, len({one.name for one in profile.storages if name.fullmatch(one.name)}))
