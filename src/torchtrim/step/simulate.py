"""The one simulator: a step with edits -> bytes over time, the peak and the seconds.

`simulate` runs through the whole step once. `step.incremental` does the same for searches, one option at a
time. tests/step/oracle.py is a slow version that shares no code with either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import add
from typing import NamedTuple

from torchtrim.memory.packing.buffers import Life, bytes_over_time
from torchtrim.step.edits import Edit, Insert
from torchtrim.step.links import added_seconds
from torchtrim.step.step import DEVICE, Step


class Outcome(NamedTuple):
    """The peak of a pool in bytes, the task during or before which it occurs, and the added seconds.

    `task` is -1 for a step without tasks.
    """

    peak_bytes: int
    task: int
    added_seconds: float


class Timeline(NamedTuple):
    """Bytes of a pool: on entry to each task, and the highest during it or the work inserted before it."""

    before: list[int]
    high: list[int]


def simulate(step: Step, edits: Iterable[Edit] = (), pool: str = DEVICE) -> Outcome:
    """Return the outcome of a step with these edits, whose claims must not overlap."""
    edits = tuple(edits)
    high = timeline(step, edits, pool).high
    peak = max(high, default=0)
    return Outcome(peak, high.index(peak) if high else -1, added_seconds(step, edits))


def timeline(step: Step, edits: Sequence[Edit] = (), pool: str = DEVICE) -> Timeline:
    """Return the bytes of a pool over the tasks of the step with these edits."""
    count = len(step.tasks)
    before = bytes_over_time(count, lives(step, edits, pool))
    if pool != DEVICE:
        return Timeline(before, list(before))
    high = list(map(add, before, (task.transient for task in step.tasks)))
    for edit in edits:
        for rise in edit.rises:
            high[rise.task] = before[rise.task] + rise.bytes
    for edit in edits:
        for insert in edit.inserts:
            if insert.at < count:
                high[insert.at] = max(high[insert.at], before[insert.at] + level(insert))
    return Timeline(before, high)


def level(insert: Insert) -> int:
    """Return the bytes of inserted work above those alive when the following task begins."""
    return insert.rise - insert.makes


def lives(step: Step, edits: Sequence[Edit] = (), pool: str = DEVICE) -> Iterable[Life]:
    """Yield the bytes of each tensor of a pool with edits, alive on entry to tasks `first <= i < last`."""
    ends = deaths(step, edits)
    for number, tensor in enumerate(step.tensors):
        if tensor.pool == pool:
            yield tensor.bytes, tensor.birth + 1, ends.get(number, tensor.death)
    for edit in edits:
        for block in edit.blocks:
            if block.pool == pool:
                yield block.bytes, block.first, block.last


def deaths(step: Step, edits: Iterable[Edit]) -> dict[int, int]:
    """Return the death of each tensor that an edit drops or needs."""
    dropped: defaultdict[int, set[int]] = defaultdict(set)
    needed: defaultdict[int, int] = defaultdict(int)
    for edit in edits:
        for drop in edit.drops:
            dropped[drop.tensor].add(drop.hold)
        for need in edit.needs:
            needed[need.tensor] = max(needed[need.tensor], need.until)
    return {
        number: step.tensors[number].end(dropped.get(number, ()), (needed.get(number, 0),))
        for number in dropped.keys() | needed.keys()
    }
