"""Gradients that hold zeros: filled by `zero_grad(set_to_none=False)` rather than dropped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from torchtrim.records.operator_names import base_name
from torchtrim.records.profile import Operator, Profile
from torchtrim.records.remembered import remembered

_ZEROING = frozenset(("aten::zero_", "aten::_foreach_zero_"))


class Zeroed(NamedTuple):
    """A gradient that holds only zeros during operators `first <= i < last`.

    `by` is the operator that filled it. `accumulated`: backward adds to it afterwards. A gradient
    zeroed at the end of the step is zero at the start of the next, so it has two stretches.
    """

    storage: int
    by: int
    first: int
    last: int
    accumulated: bool


class _Write(NamedTuple):
    operator: int
    zeroing: bool


def zeroed_gradients(profile: Profile) -> list[Zeroed]:
    """Every stretch of the step in which a gradient is allocated and holds only zeros."""
    return list(_zeroed(profile))


@remembered
def _zeroed(profile: Profile) -> tuple[Zeroed, ...]:
    writes: dict[int, list[_Write]] = defaultdict(list)
    for index, op in enumerate(profile.operators):
        for storage in op.mutates:
            if profile.storages[storage].kind == "gradient":
                writes[storage].append(_Write(index, _fills_with_zeros(op)))
    return tuple(
        z for storage, found in writes.items() for z in _stretches(profile, storage, found)
    )


def _fills_with_zeros(op: Operator) -> bool:
    return base_name(op.name) in _ZEROING and op.phase not in ("backward", "recompute")


def _stretches(profile: Profile, storage: int, writes: list[_Write]) -> Iterator[Zeroed]:
    life = profile.storages[storage]
    for write, following in zip(writes, [*writes[1:], None], strict=True):
        if write.zeroing:
            yield _stretch(storage, write.operator, write.operator, following, life.death)
    if writes[-1].zeroing and life.birth < 0 and life.death == len(profile.operators):
        yield _stretch(storage, writes[-1].operator, 0, writes[0], life.death)


def _stretch(storage: int, by: int, first: int, until: _Write | None, death: int) -> Zeroed:
    """Going into the operator that accumulates, the gradient is still zero: that one counts."""
    if until is None:
        return Zeroed(storage, by, first, death, accumulated=False)
    accumulated = not until.zeroing
    return Zeroed(storage, by, first, until.operator + accumulated, accumulated)
