"""Work that was queued on an emulated stream and is not done yet."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from torchtrim.emulator.poison import Shape, alias, copy_of, shape_of, unowned


class Cell:
    """A storage that pending work uses; another one as soon as the program has let go of it.

    `pending` counts the work on it of each stream, and `last` numbers the newest.
    """

    __slots__ = ("key", "last", "pending", "storage")

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self.key: int = storage._cdata
        self.pending: Counter[int] = Counter()
        self.last: dict[int, int] = {}


class Place(NamedTuple):
    """Where a tensor is that pending work uses."""

    cell: Cell
    shape: Shape

    def tensor(self) -> torch.Tensor:
        """The tensor, as it is now."""
        return alias(self.cell.storage, self.shape)


class Work(NamedTuple):
    """An operator that was queued: its number on its stream, and the work of others that it is behind."""

    serial: int
    do: Callable[[], None]
    cells: tuple[Cell, ...]
    after: tuple[tuple[int, int], ...]


class Pending:
    """The queues of all streams, and the storages that what is in them uses."""

    def __init__(self) -> None:
        self.queues: defaultdict[int, deque[Work]] = defaultdict(deque)
        self._cells: dict[int, Cell] = {}
        self._due: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)

    def behind(self, stream: int, other: int, serial: int) -> None:
        """What a stream gets from now on is behind the work of another, up to a serial."""
        self._due[stream].append((other, serial))

    def add(
        self, stream: int, serial: int, do: Callable[[], None], places: Iterable[Place]
    ) -> None:
        """Queue work that uses tensors at these places."""
        cells = tuple({place.cell.key: place.cell for place in places}.values())
        for cell in cells:
            cell.pending[stream] += 1
            cell.last[stream] = serial
        after = tuple(self._due.pop(stream, ()))
        self.queues[stream].append(Work(serial, do, cells, after))

    def uses(self, stream: int, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether a stream has queued work on one of these tensors."""
        if not self.queues[stream]:
            return False
        keys = {cell.key for work in self.queues[stream] for cell in work.cells}
        return any(tensor.untyped_storage()._cdata in keys for tensor in tensors)

    def placed(self, values: Any) -> Any:
        """The same nest of values, with places where tensors were."""
        return tree_map(self._place, values)

    def complete(self, stream: int, until: int | None = None) -> None:
        """Do the work of a stream, up to a serial if one is given, and before it what it is behind."""
        queue = self.queues[stream]
        while queue and (until is None or queue[0].serial <= until):
            work = queue.popleft()
            for other, serial in work.after:
                self.complete(other, serial)
            with unowned():
                work.do()
            for cell in work.cells:
                self._leave(cell, stream)
        if not queue and until is None:
            self.catch_up(stream)

    def catch_up(self, stream: int) -> None:
        """Do what a stream with nothing queued has waited for."""
        if not self.queues[stream]:
            for other, serial in self._due.pop(stream, ()):
                self.complete(other, serial)

    def let_go(self, is_lost: Callable[[Cell], bool | None]) -> None:
        """Storages that only pending work still uses are gone: whether poisoned, `is_lost` says.

        None: it cannot be said yet.
        """
        for cell in list(self._cells.values()):
            if _uses(cell.key) > 1 or (lost := is_lost(cell)) is None:
                continue
            del self._cells[cell.key]
            with unowned():
                cell.storage = copy_of(cell.storage, poisoned=lost)

    def _place(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        cell = self._cells.setdefault(storage._cdata, Cell(storage))
        return Place(cell, shape_of(value))

    def _leave(self, cell: Cell, stream: int) -> None:
        cell.pending[stream] -= 1
        if not +cell.pending and self._cells.get(cell.key) is cell:
            del self._cells[cell.key]


def places_among(values: Any) -> list[Place]:
    """The places in a nest of values."""
    leaves = tree_leaves(values, is_leaf=_is_place)
    return [one for one in leaves if isinstance(one, Place)]


def tensors_at(values: Any) -> Any:
    """The same nest of values, with tensors where places were."""
    return tree_map(
        lambda one: one.tensor() if isinstance(one, Place) else one, values, is_leaf=_is_place
    )


def _is_place(value: Any) -> bool:
    return isinstance(value, Place)


def _uses(key: int) -> int:
    count: Any = torch._C._storage_Use_Count
    return int(count(key))
