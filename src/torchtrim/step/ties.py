"""Which options bear on which tensors of a step, and at which tasks they may change the bytes alive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from torchtrim.step.edits import Edit
from torchtrim.step.step import DEVICE, Step, Tensor


def ends_at(tensor: Tensor, gone: Set[int], needed: Iterable[int]) -> int:
    """When a tensor dies without these holds, and needed until these tasks."""
    kept = [hold.until for place, hold in enumerate(tensor.holds) if place not in gone]
    return max((tensor.birth + 1, *kept, *needed))


class Tie(NamedTuple):
    """Which options end which holds of a tensor, until when options need it, and all of these options."""

    drops: list[tuple[int, int]]
    needs: list[tuple[int, int]]
    options: set[int]


def ties_of(step: Step, edits: Sequence[Edit]) -> dict[int, Tie]:
    """The tensors of the device that options bear on."""
    found: dict[int, Tie] = {}

    def tie(number: int) -> Tie | None:
        tensor = step.tensors[number]
        counts = tensor.pool == DEVICE and tensor.bytes
        return found.setdefault(number, Tie([], [], set())) if counts else None

    for option, edit in enumerate(edits):
        for drop in edit.drops:
            if (one := tie(drop.tensor)) is not None:
                one.drops.append((option, drop.hold))
                one.options.add(option)
        for need in edit.needs:
            if (one := tie(need.tensor)) is not None:
                one.needs.append((option, need.until))
                one.options.add(option)
    return found


def starts_of(step: Step, edits: Sequence[Edit]) -> list[int]:
    """The tasks at which options may change the bytes alive, the first task among them."""
    count = len(step.tasks)
    moments = {0} if count else set()
    for edit in edits:
        for block in edit.blocks:
            moments.update((block.first, block.last))
        for insert in edit.inserts:
            moments.update((insert.at, insert.at + 1))
        for rise in edit.rises:
            moments.update((rise.task, rise.task + 1))
        for need in edit.needs:
            moments.update((need.until, step.tensors[need.tensor].death))
        for drop in edit.drops:
            tensor = step.tensors[drop.tensor]
            moments.update((tensor.birth + 1, *(hold.until for hold in tensor.holds)))
    return sorted(moment for moment in moments if 0 <= moment < count)
