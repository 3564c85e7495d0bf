"""Explains why a storage is live at a moment of the step."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torchtrim.analysis.held import averages, dropped_unread
from torchtrim.analysis.timeline import alive, peak_operator
from torchtrim.records.operator_names import base_name, word_of
from torchtrim.records.profile import Call, Kind, Profile
from torchtrim.records.remembered import remembered

_ZEROING = frozenset(("aten::zero_", "aten::_foreach_zero_"))
_Write = tuple[int, bool]
"""An operator that writes a gradient, and True if it fills it with zeros."""


class Zeroed(NamedTuple):
    """A gradient that holds only zeros during operators `first <= i < last`.

    `by` is the operator that filled it. `accumulated`: backward adds to it afterwards. A gradient zeroed at
    the end of the step is zero at the start of the next, so it has two intervals.
    """

    storage: int
    by: int
    first: int
    last: int
    accumulated: bool


@remembered
def zeroed_gradients(profile: Profile) -> tuple[Zeroed, ...]:
    """Return every interval of the step during which an allocated gradient holds only zeros."""
    writes: dict[int, list[_Write]] = defaultdict(list)
    for index, op in enumerate(profile.operators):
        for storage in op.mutates:
            if profile.storages[storage].kind == "gradient":
                zeroing = base_name(op.name) in _ZEROING
                zeroing = zeroing and op.phase not in ("backward", "recompute")
                writes[storage].append((index, zeroing))
    return tuple(
        zeroed for storage, own in writes.items() for zeroed in _stretches(profile, storage, own)
    )


def _stretches(profile: Profile, storage: int, writes: list[_Write]) -> Iterator[Zeroed]:
    life = profile.storages[storage]
    for (operator, zeroing), following in zip(writes, [*writes[1:], None], strict=True):
        if zeroing:
            yield _stretch(storage, operator, operator, following, life.death)
    last, zeroing = writes[-1]
    if zeroing and life.birth < 0 and life.death == len(profile.operators):
        yield _stretch(storage, last, 0, writes[0], life.death)


def _stretch(storage: int, by: int, first: int, until: _Write | None, death: int) -> Zeroed:
    """Include the operator that accumulates: before it runs, the gradient is still zero."""
    if until is None:
        return Zeroed(storage, by, first, death, accumulated=False)
    operator, zeroing = until
    return Zeroed(storage, by, first, operator + (not zeroing), accumulated=not zeroing)


_ALWAYS: dict[Kind, str] = {
    "parameter": "parameter",
    "buffer": "buffer",
    "optimizer_state": "optimizer state",
    "gathered": "gathered from all ranks",
}


class LastReads(NamedTuple):
    """For each storage, the last operator that reads it, and the last in backward, or -1."""

    any: array[int]
    backward: array[int]


_HELD = "held by a Python reference"
_NO_BACKWARD = "kept by autograd or a Python reference: gradients are on, no backward follows"


def why_alive(profile: Profile, storages: Iterable[int], at: int) -> dict[int, str]:
    """Explain in a few words why each storage is live at an operator; -1 is before the step.

    The words name what keeps it: `saved by matmul for backward`, `read later by addition`, `held by a Python
    reference`, `gradient until zero_grad`.
    """
    zeroed = {z.storage for z in zeroed_gradients(profile) if z.first <= at < z.last}
    in_graph = _graph_without_backward(profile)
    words = {}
    for index in storages:
        why = _why(profile, index, at)
        if index in zeroed:
            why = "zeroed gradient, not dropped"
        elif why == _HELD and profile.storages[index].birth in in_graph:
            why = _NO_BACKWARD
        words[index] = why
    return words


@remembered
def _last_reads(profile: Profile) -> LastReads:
    last = array("q", [-1]) * len(profile.storages)
    backward = array("q", last)
    for index, op in enumerate(profile.operators):
        of_backward = op.phase == "backward"
        for use in op.inputs:
            last[use.storage] = index
            if of_backward:
                backward[use.storage] = index
    return LastReads(last, backward)


def _why(profile: Profile, index: int, at: int) -> str:
    storage = profile.storages[index]
    last, backward = (reads[index] for reads in _last_reads(profile))
    if storage.kind == "gradient":
        return "gradient until zero_grad"
    if storage.kind == "input" and (last >= 0 or index in standing(profile)):
        return standing(profile).get(index, "input batch")
    if storage.kind in _ALWAYS:
        return _ALWAYS[storage.kind]
    if 0 <= at == storage.birth:
        return f"being computed by {_name(profile, at)}"
    if last >= max(at, 0):
        if backward >= at and _from_forward(profile, index):
            return _saved(profile, index, backward)
        when = "being read" if last == at else "read later"
        return f"{when} by {_name(profile, last)}"
    if storage.birth < 0:
        return "held by a Python reference since before the step"
    if _from_forward(profile, index) and _dies_in_backward(profile, index):
        return f"released by backward {'after' if backward >= 0 else 'without'} being read"
    return _HELD


@remembered
def standing(profile: Profile) -> dict[int, str]:
    """Return what tensors of before the step are, apart from those that are fed to a model."""
    reads = (op for op in profile.operators if op.phase not in ("other", "loader"))
    fed = {use.storage for op in reads for use in op.inputs}
    words = {
        number: "held by the script from step to step"
        for number, storage in enumerate(profile.storages)
        if storage.birth < 0 and storage.death == len(profile.operators) and number not in fed
    }
    words |= dict.fromkeys(dropped_unread(profile, "input"), "left by the step before")
    return words | dict.fromkeys(averages(profile), "average of the parameters")


def _saved(profile: Profile, index: int, reader: int) -> str:
    maker = profile.operators[profile.storages[index].birth]
    verb = "recomputed" if maker.phase == "recompute" else "saved"
    forward = profile.operators[reader].forward
    if forward < 0:
        return f"{verb} for {_name(profile, reader)} in backward"
    name = _name(profile, forward)
    return f"saved by {name} for backward" if verb == "saved" else f"{verb} for backward of {name}"


def _from_forward(profile: Profile, index: int) -> bool:
    birth = profile.storages[index].birth
    return birth >= 0 and profile.operators[birth].phase not in ("backward", "optimizer")


def _dies_in_backward(profile: Profile, index: int) -> bool:
    """Return True if it dies between two backward operators. After the last one, its owner is unknown."""
    death = profile.storages[index].death
    around = profile.operators[max(death - 1, 0) : death + 1]
    return len(around) == 2 and all(op.phase == "backward" for op in around)


def _graph_without_backward(profile: Profile) -> set[int]:
    """Return operators that modules ran with gradients enabled, in a step without backward."""
    if any(op.phase == "backward" for op in profile.operators):
        return set()
    roots = (call for call in profile.calls if call.graded and call.depth == 0)
    return {operator for call in roots for operator in range(call.first, call.last)}


def _name(profile: Profile, operator: int) -> str:
    return word_of(profile.operators[operator].name)


def saved_storages(profile: Profile, at: int | None = None) -> list[int]:
    """Return storages live at an operator (default: the peak) that forward keeps for backward.

    Backward still reads or releases them. In order of birth, without parameters, inputs and storages from
    before the step.
    """
    at = peak_operator(profile) if at is None else at
    read = _last_reads(profile).backward
    kept = (
        index
        for index in alive(profile, at)
        if profile.storages[index].kind in ("activation", "temporary")
        and _from_forward(profile, index)
        and (read[index] >= at or _dies_in_backward(profile, index))
    )
    return sorted(kept, key=lambda i: profile.storages[i].birth)


def released_by_recompute(
    profile: Profile, calls: Iterable[Call], at: int | None = None
) -> list[int]:
    """Return the bytes that recomputing each call in backward would free at the peak.

    These are the saved activations created inside the call, except its inputs and outputs, which stay.
    """
    saved = saved_storages(profile, at)
    births = [profile.storages[i].birth for i in saved]
    released = []
    for call in calls:
        inside = saved[bisect_left(births, call.first) : bisect_left(births, call.last)]
        stays = {*call.inputs, *call.outputs}
        released.append(sum(profile.storages[i].counted for i in inside if i not in stays))
    return released
