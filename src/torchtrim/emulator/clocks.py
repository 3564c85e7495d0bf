"""Vector clocks over streams, the races they detect, and the queues of pending work.

The method is that of race detectors for threads, applied to streams: an event carries the clock of its
stream, and a stream that waits for the event merges that clock. Lamport, Time, Clocks, and the Ordering of
Events (1978); Mattern, Virtual Time and Global States of Distributed Systems (1989).
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

_BYTE = 0xFF  # All ones are NaN in every floating-point type and -1 in every signed one.


class Shape(NamedTuple):
    """The layout of a tensor in its storage."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@contextlib.contextmanager
def unowned() -> Iterator[None]:
    """Run the device's own work, unseen by modes, subclasses and autograd."""
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        yield


def shape_of(tensor: torch.Tensor) -> Shape:
    """Return the layout of a tensor in its storage."""
    return Shape(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def alias(storage: Any, shape: Shape) -> torch.Tensor:
    """Return a tensor over a storage, with its own version counter. Call inside `unowned`."""
    return torch.empty(0, dtype=shape.dtype, device="cpu").set_(
        storage, shape.offset, shape.size, shape.stride
    )


def copy_of(storage: Any, *, poisoned: bool = False) -> Any:
    """Copy a storage, or return a poisoned one of its size. Call inside `unowned`."""
    if poisoned:
        size = (storage.nbytes(),)
        return torch.full(size, _BYTE, dtype=torch.uint8, device="cpu").untyped_storage()
    return _bytes(storage).clone().untyped_storage()


def poison(tensor: torch.Tensor) -> None:
    """Fill a new tensor's storage with poison (True for booleans)."""
    with unowned():
        _bytes(tensor.untyped_storage()).fill_(1 if tensor.dtype is torch.bool else _BYTE)


def _bytes(storage: Any) -> torch.Tensor:
    return alias(storage, Shape(torch.uint8, (storage.nbytes(),), (1,), 0))


class StorageCell:
    """A storage used by pending work, replaced by a copy once the program has freed it.

    `pending` counts each stream's work on it, and `last` is the number of the newest.
    """

    __slots__ = ("key", "last", "pending", "storage")

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self.key: int = storage._cdata
        self.pending: Counter[int] = Counter()
        self.last: dict[int, int] = {}


@dataclass(slots=True, eq=False)
class TensorPlace:
    """The location of a tensor used by pending work."""

    cell: StorageCell
    shape: Shape

    def tensor(self) -> torch.Tensor:
        """Return the tensor in its current storage."""
        return alias(self.cell.storage, self.shape)


class Work(NamedTuple):
    """A queued operator: its number on its stream, and the work of other streams that it waits for."""

    serial: int
    do: Callable[[], None]
    cells: tuple[StorageCell, ...]
    after: tuple[tuple[int, int], ...]


class Pending:
    """The queues of all streams, and the storages used by queued work."""

    def __init__(self) -> None:
        self.queues: defaultdict[int, deque[Work]] = defaultdict(deque)
        self._cells: dict[int, StorageCell] = {}
        self._due: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)

    def behind(self, stream: int, other: int, serial: int) -> None:
        """Order a stream's further work after another stream's work up to a serial."""
        self._due[stream].append((other, serial))

    def add(self, stream: int, serial: int, do: Callable[[], None], values: Any) -> None:
        """Queue work that uses the tensors at the places in a nest of values."""
        places = (leaf for leaf in tree_leaves(values) if isinstance(leaf, TensorPlace))
        cells = tuple({place.cell.key: place.cell for place in places}.values())
        for cell in cells:
            cell.pending[stream] += 1
            cell.last[stream] = serial
        self.queues[stream].append(Work(serial, do, cells, tuple(self._due.pop(stream, ()))))

    def uses(self, stream: int, tensors: Iterable[torch.Tensor]) -> bool:
        """Return True if a stream has queued work on one of these tensors."""
        if not self.queues[stream]:
            return False
        keys = {cell.key for work in self.queues[stream] for cell in work.cells}
        return any(tensor.untyped_storage()._cdata in keys for tensor in tensors)

    def placed(self, values: Any) -> Any:
        """Replace tensors in a nest of values by places."""
        return tree_map_only(torch.Tensor, self._place, values)

    def complete(self, stream: int, until: int | None = None) -> None:
        """Run a stream's work (up to a serial), and first the work that it waits for."""
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
        """Run the work that a stream with an empty queue has waited for."""
        if not self.queues[stream]:
            for other, serial in self._due.pop(stream, ()):
                self.complete(other, serial)

    def let_go(self, is_lost: Callable[[StorageCell], bool | None]) -> None:
        """Release storages that only pending work uses, and poison lost ones; `is_lost` may be undecided."""
        use_count: Any = torch._C._storage_Use_Count
        for cell in list(self._cells.values()):
            if use_count(cell.key) > 1 or (lost := is_lost(cell)) is None:
                continue
            del self._cells[cell.key]
            with unowned():
                cell.storage = copy_of(cell.storage, poisoned=lost)

    def _place(self, tensor: torch.Tensor) -> TensorPlace:
        storage = tensor.untyped_storage()
        cell = self._cells.setdefault(storage._cdata, StorageCell(storage))
        return TensorPlace(cell, shape_of(tensor))

    def _leave(self, cell: StorageCell, stream: int) -> None:
        cell.pending[stream] -= 1
        if not +cell.pending and self._cells.get(cell.key) is cell:
            del self._cells[cell.key]


READ = "stream-read"
WRITE = "stream-write"
FREE = "stream-free"
_HOST = -1


@dataclass(slots=True, eq=False)
class Access:
    """An operator on a stream: its serial there, and its number in a recording (or -1)."""

    stream: int
    serial: int
    operator: int = -1


class Race(NamedTuple):
    """A race, as a row of `syncs`, and the operator to change."""

    row: str
    access: Access


ByteRange = tuple[int, float]  # The first byte in a storage and the byte after the last.
WHOLE: ByteRange = (0, math.inf)


class Use(NamedTuple):
    """A range of a storage used by an operator."""

    storage: Any
    span: ByteRange = WHOLE


@dataclass(slots=True, eq=False)
class _StorageRange:
    """A range of a storage, its last writer and the readers since."""

    span: ByteRange
    write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)

    def meets(self, span: ByteRange) -> bool:
        return self.span[0] < span[1] and span[0] < self.span[1]

    def is_within(self, span: ByteRange) -> bool:
        return span[0] <= self.span[0] and self.span[1] <= span[1]

    @property
    def users(self) -> list[Access]:
        return [*([self.write] if self.write is not None else ()), *self.reads.values()]


class _Watched(weakref.ref[Any]):
    """A storage used by streams, and its separately used ranges.

    `home`: the stream that owns the memory; once freed, its next allocation reuses it, except on the host.
    `kept`: the streams passed to `record_stream`.
    """

    __slots__ = ("home", "kept", "key", "parts")
    key: int
    home: int
    parts: list[_StorageRange]
    kept: set[int]

    def met(self, span: ByteRange) -> list[_StorageRange]:
        return [part for part in self.parts if part.meets(span)]

    def part(self, span: ByteRange) -> _StorageRange:
        for part in self.parts:
            if part.span == span:
                return part
        self.parts.append(_StorageRange(span))
        return self.parts[-1]

    @property
    def users(self) -> list[Access]:
        return [access for part in self.parts for access in part.users]


class Clocks:
    """Vector clocks of streams, and the accesses to storages. Appends to `races`.

    `on_device` returns True for a storage of the device, False for pinned host memory.
    """

    def __init__(self, on_device: Callable[[Any], bool]) -> None:
        self._on_device = on_device
        self.races: list[Race] = []
        self.last: Access | None = None
        self._seen: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._host: dict[int, int] = {}
        self._events: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()
        self._storages: dict[int, _Watched] = {}
        self._dead: list[_Watched] = []

    def issue(self, stream: int) -> Access:
        """Queue an operator after everything that the host and the stream have waited for."""
        seen = self._seen[stream]
        _join(seen, self._host)
        seen[stream] = seen.get(stream, 0) + 1
        access = self.last = Access(stream, seen[stream])
        self._reuse(stream, access)
        return access

    def serial(self, stream: int) -> int:
        """Return the number of the newest operator of a stream."""
        return self._seen[stream].get(stream, 0)

    def has_seen(self, stream: int, other: int, serial: int) -> bool:
        """Return True if a stream's further work is ordered after an operator of another stream."""
        return max(self._seen[stream].get(other, 0), self._host.get(other, 0)) >= serial

    def read(self, uses: Iterable[Use], access: Access) -> list[int]:
        """Record reads. Returns the storages whose contents may not be ready."""
        early = []
        for storage, span in uses:
            watched = self.watched(storage)
            if not all(self._ordered(part.write, access) for part in watched.met(span)):
                self.races.append(Race(READ, access))
                early.append(watched.key)
            watched.part(span).reads[access.stream] = access
        return early

    def write(self, uses: Iterable[Use], access: Access) -> None:
        """Record writes."""
        for storage, span in uses:
            watched = self.watched(storage)
            earlier = (user for part in watched.met(span) for user in part.users)
            if not all(self._ordered(user, access) for user in earlier):
                self.races.append(Race(WRITE, access))
            watched.parts = [part for part in watched.parts if not part.is_within(span)]
            watched.parts.append(_StorageRange(span, access))

    def make(self, storages: Iterable[Any], access: Access, *, on_device: bool) -> None:
        """Record new storages, in the memory of the operator's stream or of the host."""
        for storage in storages:
            watched = self._watch(storage, access.stream if on_device else _HOST)
            watched.parts = [_StorageRange(WHOLE, access)]

    def recorded(self, event: Any, stream: int) -> None:
        """Record an event after all work that a stream has queued."""
        self._events[event] = {**self._host, **self._seen[stream]}

    def awaited(self, event: Any, stream: int) -> None:
        """Order a stream's further work after an event."""
        _join(self._seen[stream], self._events.get(event, {}))

    def synchronized(self, subject: Any) -> None:
        """Record a wait of the host: for everything (None), a stream's number, or an event."""
        if subject is None:
            for seen in list(self._seen.values()):
                _join(self._host, seen)
        elif isinstance(subject, int):
            _join(self._host, self._seen[subject])
        else:
            _join(self._host, self._events.get(subject, {}))

    def _ordered(self, earlier: Access | None, later: Access) -> bool:
        if earlier is None or earlier.stream == later.stream:
            return True
        return self._seen[later.stream].get(earlier.stream, 0) >= earlier.serial

    def _reuse(self, stream: int, now: Access) -> None:
        """Check freed memory for reuse while other streams, unknown to the allocator, still use it."""
        if not (freed := [dead for dead in self._dead if dead.home == stream]):
            return
        self._dead = [dead for dead in self._dead if dead.home != stream]
        for watched in freed:
            for access in watched.users:
                if access.stream not in watched.kept and not self._ordered(access, now):
                    self.races.append(Race(FREE, access))

    def watched(self, storage: Any) -> _Watched:
        """Return a known storage. An unknown one belongs to the default stream."""
        known = self._storages.get(storage._cdata)
        return known or self._watch(storage, 0 if self._on_device(storage) else _HOST)

    def _watch(self, storage: Any, home: int) -> _Watched:
        watched = self._storages[storage._cdata] = _Watched(storage, self._died)
        watched.key, watched.home = storage._cdata, home
        watched.parts, watched.kept = [], set()
        return watched

    def _died(self, watched: _Watched) -> None:
        if self._storages.get(watched.key) is watched:
            del self._storages[watched.key]
            others = any(access.stream != watched.home for access in watched.users)
            if watched.home != _HOST and others:
                self._dead.append(watched)


def _join(into: dict[int, int], other: dict[int, int]) -> None:
    for stream, serial in other.items():
        if serial > into.get(stream, 0):
            into[stream] = serial
