"""A slow simulator that shares no code with torchtrim's: at every moment it asks of everything whether it
is there."""

from __future__ import annotations

from collections.abc import Sequence

from torchtrim.step.edits import Edit
from torchtrim.step.step import Step


def bytes_before(step: Step, edits: Sequence[Edit], task: int, pool: str) -> int:
    """Bytes of a pool that are there when a task begins, what was inserted before it included."""
    total = 0
    for number, tensor in enumerate(step.tensors):
        if tensor.pool == pool and _is_kept(step, edits, number, task):
            total += tensor.bytes
    for edit in edits:
        total += sum(b.bytes for b in edit.blocks if b.pool == pool and b.first <= task < b.last)
    return total


def _is_kept(step: Step, edits: Sequence[Edit], number: int, task: int) -> bool:
    tensor = step.tensors[number]
    if task <= tensor.birth:
        return False
    for place, hold in enumerate(tensor.holds):
        ended = any((d.tensor, d.hold) == (number, place) for e in edits for d in e.drops)
        if not ended and task < hold.until:
            return True
    return any(n.tensor == number and task < n.until for e in edits for n in e.needs)


def moments(step: Step, edits: Sequence[Edit]) -> list[tuple[int, int]]:
    """Of each task, and of each piece of work inserted before one: the task, the highest bytes."""
    found = []
    for number, task in enumerate(step.tasks):
        there = bytes_before(step, edits, number, "device")
        for edit in edits:
            for insert in edit.inserts:
                if insert.at == number:
                    found.append((number, there - insert.makes + insert.rise))
        rises = [r.bytes for edit in edits for r in edit.rises if r.task == number]
        found.append((number, there + (rises[0] if rises else task.transient)))
    return found


def peak(step: Step, edits: Sequence[Edit] = ()) -> int:
    """The highest bytes of the step."""
    return max((size for _, size in moments(step, edits)), default=0)
