"""Why a storage is alive at a moment of the step."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

from torchtrim.analysis.gradients import zeroed_gradients
from torchtrim.records.operator_names import base_name
from torchtrim.records.profile import Kind, Profile
from torchtrim.records.remembered import remembered

_ALWAYS: dict[Kind, str] = {
    "parameter": "parameter",
    "buffer": "buffer",
    "optimizer_state": "optimizer state",
    "gathered": "gathered from all ranks",
}


class LastReads(NamedTuple):
    """The last operator that reads a storage, and the last in backward; -1 for none."""

    any: int
    backward: int


_HELD = "held by a Python reference"
_NO_BACKWARD = "kept by autograd or a Python reference: gradients are on, no backward follows"


def why_alive(profile: Profile, storages: Iterable[int], at: int) -> dict[int, str]:
    """A few words for each storage on why it is alive at an operator; -1 for before the step.

    They name what keeps it: `saved for backward of aten::addmm`, `read later by aten::add`,
    `held by a Python reference`, `gradient until zero_grad`.
    """
    reads = last_reads(profile, storages)
    zeroed = {z.storage for z in zeroed_gradients(profile) if z.first <= at < z.last}
    words = {index: _why(profile, index, at, last) for index, last in reads.items()}
    in_graph = _graph_without_backward(profile)
    for index, why in words.items():
        if index in zeroed:
            words[index] = "zeroed gradient, not dropped"
        elif why == _HELD and profile.storages[index].birth in in_graph:
            words[index] = _NO_BACKWARD
    return words


def last_reads(profile: Profile, storages: Iterable[int]) -> dict[int, LastReads]:
    """The last readers of each storage."""
    last, backward = _last_of_all(profile)
    return {storage: LastReads(last[storage], backward[storage]) for storage in storages}


@remembered
def _last_of_all(profile: Profile) -> tuple[array[int], array[int]]:
    """The last operator that reads each storage, and the last in backward."""
    last = array("q", [-1]) * len(profile.storages)
    backward = array("q", last)
    for index, op in enumerate(profile.operators):
        of_backward = op.phase == "backward"
        for use in op.inputs:
            last[use.storage] = index
            if of_backward:
                backward[use.storage] = index
    return last, backward


def kept_for_backward(profile: Profile, storage: int, at: int, reads: LastReads) -> bool:
    """Whether forward made it and the graph keeps it: backward still reads it, or releases it."""
    return _from_forward(profile, storage) and (
        reads.backward >= at or _dies_in_backward(profile, storage)
    )


def _why(profile: Profile, index: int, at: int, reads: LastReads) -> str:
    storage = profile.storages[index]
    if storage.kind == "gradient":
        return "gradient until zero_grad"
    if storage.kind == "input" and reads.any >= 0:
        return "input batch"
    if storage.kind in _ALWAYS:
        return _ALWAYS[storage.kind]
    if 0 <= at == storage.birth:
        return f"being computed by {_name(profile, at)}"
    if reads.any >= max(at, 0):
        return _read_again(profile, index, at, reads)
    return _not_read_again(profile, index, reads)


def _read_again(profile: Profile, index: int, at: int, reads: LastReads) -> str:
    if reads.backward >= at and _from_forward(profile, index):
        return _saved(profile, index, reads.backward)
    when = "being read" if reads.any == at else "read later"
    return f"{when} by {_name(profile, reads.any)}"


def _saved(profile: Profile, index: int, reader: int) -> str:
    made = profile.operators[profile.storages[index].birth]
    verb = "recomputed" if made.phase == "recompute" else "saved"
    forward = profile.operators[reader].forward
    if forward < 0:
        return f"{verb} for {_name(profile, reader)} in backward"
    return f"{verb} for backward of {_name(profile, forward)}"


def _not_read_again(profile: Profile, index: int, reads: LastReads) -> str:
    if profile.storages[index].birth < 0:
        return "held by a Python reference since before the step"
    if _from_forward(profile, index) and _dies_in_backward(profile, index):
        return f"released by backward {'after' if reads.backward >= 0 else 'without'} being read"
    return _HELD


def _from_forward(profile: Profile, index: int) -> bool:
    birth = profile.storages[index].birth
    return birth >= 0 and profile.operators[birth].phase not in ("backward", "optimizer")


def _dies_in_backward(profile: Profile, index: int) -> bool:
    """Between two backward operators. What dies after the last may be anyone's, so it is not."""
    death = profile.storages[index].death
    around = profile.operators[max(death - 1, 0) : death + 1]
    return len(around) == 2 and all(op.phase == "backward" for op in around)


def _graph_without_backward(profile: Profile) -> set[int]:
    """Operators that modules ran with gradients on, in a step without backward."""
    if any(op.phase == "backward" for op in profile.operators):
        return set()
    roots = (call for call in profile.calls if call.graded and call.depth == 0)
    return {operator for call in roots for operator in range(call.first, call.last)}


def _name(profile: Profile, operator: int) -> str:
    return base_name(profile.operators[operator].name)
