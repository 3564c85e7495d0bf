"""Asynchronous moves of storages to the host and back, on two long-lived streams."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torchtrim.executor.mapped_files import mapped
from torchtrim.executor.saved_tensors import when_asked
from torchtrim.techniques.offload_activations.places import Room


class View(NamedTuple):
    """Layout of a tensor in its storage."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Loan(NamedTuple):
    """Host memory for one copy, and the events to wait for before writing to it."""

    memory: torch.Tensor
    after: Sequence[Any]
    range: _Range | None


@dataclass(eq=False)
class _Range:
    """A lent range of the slab: still in use, or with the event to wait for before its reuse."""

    first: int
    last: int
    after: Any = None
    is_lent: bool = True


class StorageMover:
    """Streams and host memory of one plan, allocated once and reused.

    A copy goes to the first free one of its planned offsets in the slab. Without a free offset, for example
    in a step that keeps more than planned, it gets a separate allocation.
    """

    def __init__(self, slab_bytes: int = 0, file_bytes: int = 0) -> None:
        self.stores = _Store(slab_bytes, _pinned), _Store(file_bytes, mapped)

    @functools.cached_property
    def streams(self) -> tuple[Any, Any]:
        """The outbound and the inbound stream."""
        return torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]


class _Store:
    """Memory of one kind: a slab, and separate allocations for the rest."""

    def __init__(self, slab_bytes: int, make: Callable[[int], torch.Tensor]) -> None:
        self._free: defaultdict[int, list[tuple[torch.Tensor, Any]]] = defaultdict(list)
        self._slab_bytes = slab_bytes
        self._slab: torch.Tensor | None = None
        self._ranges: list[_Range] = []
        self._own_make = make
        self.bytes = 0

    def take(self, size: int, offsets: Sequence[int] = ()) -> Loan:
        for offset in offsets:
            if offset + size <= self._slab_bytes and (loan := self._lent(offset, size)) is not None:
                return loan
        if self._free[size]:
            memory, after = self._free[size].pop()
            return Loan(memory, [after], None)
        return Loan(self._make(size), (), None)

    def give(self, loan: Loan, after: Any) -> None:
        """Return memory. Its next user waits for the event."""
        if loan.range is None:
            self._free[loan.memory.numel()].append((loan.memory, after))
        else:
            loan.range.is_lent, loan.range.after = False, after

    def _lent(self, first: int, size: int) -> Loan | None:
        last = first + size
        overlapping = [one for one in self._ranges if one.first < last and first < one.last]
        if any(one.is_lent for one in overlapping):
            return None
        if self._slab is None:
            self._slab = self._make(self._slab_bytes)
        over = [one for one in overlapping if first <= one.first and one.last <= last]
        self._ranges = [one for one in self._ranges if one not in over]
        self._ranges.append(_Range(first, last))
        return Loan(self._slab[first:last], self._awaited(overlapping), self._ranges[-1])

    @staticmethod
    def _awaited(ranges: Sequence[_Range]) -> list[Any]:
        """Return the events to wait for before the ranges are overwritten."""
        return [one.after for one in ranges]

    def _make(self, size: int) -> torch.Tensor:
        self.bytes += size
        return self._own_make(size)


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


class MovedStorage:
    """A saved storage: on the device, on the host, or on both during copies.

    Created when autograd saves it; `packs` counts the saved views. Several backward passes may read it. The
    host never waits: streams wait for each other's events.
    """

    def __init__(self, mover: StorageMover, storage: Any, device: torch.device, room: Room) -> None:
        self.packs = 0
        self._askers: set[int] = set()
        self._leaves = False
        self._mover = mover
        self._device = device
        self._here: torch.Tensor | None = _bytes_of(storage, device)
        self._arrived: Any = None
        self._store = mover.stores[room.in_file]
        self._loan = self._store.take(storage.nbytes(), room.offsets)
        self._host = self._loan.memory
        self._saved = self._copied(self._host, self._here, self._loan.after, is_home=False)
        self._last = self._saved
        self._is_original = True

    def release(self) -> None:
        """Free the device memory once it is copied."""
        if self._is_original and self._here is not None:
            self._await(self._saved)
            self._here = None
            self._is_original = False

    def fetch(self) -> None:
        """Start the copy back, unless it is done or under way."""
        if self._here is not None:
            return
        buffer = torch.empty(self._host.numel(), dtype=torch.uint8, device=self._device)
        self._arrived = self._last = self._copied(buffer, self._host, [self._saved], is_home=True)
        self._here = buffer

    def _copied(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Any], *, is_home: bool
    ) -> Any:
        """Copy after these events, and return the copy's own event, or None if it is complete."""
        if self._device.type != "cuda":
            target.copy_(source)
            return None
        stream = self._mover.streams[is_home]
        stream.wait_stream(torch.cuda.current_stream())
        for event in after:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    @staticmethod
    def _await(event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def get(self, view: View, asker: int) -> torch.Tensor:
        """Return a view on the device that subsequently queued work may read."""
        self.fetch()
        assert self._here is not None
        self._land()
        tensor = torch.empty(0, dtype=view.dtype, device=self._device)
        tensor.set_(self._here.untyped_storage(), view.offset, view.size, view.stride)
        self._askers.add(asker)
        if len(self._askers) >= self.packs and not self._is_original and not self._leaves:
            self._leaves = True
            when_asked(self._leave)
        return tensor

    def _leave(self) -> None:
        """Count a reader, and free the memory after the last."""
        self._askers.clear()
        self._here, self._leaves = None, False

    def _land(self) -> None:
        """Make the compute stream wait for the copy to the device."""
        self._await(self._arrived)
        self._arrived = None

    def close(self) -> None:
        """Free the memory when no reader is left, after pending copies."""
        if self._is_original and self._here is not None:
            self._await(self._saved)
        self._land()
        self._here = None
        self._store.give(self._loan, self._last)

    def __del__(self) -> None:
        if hasattr(self, "_last") and not sys.is_finalizing():
            with contextlib.suppress(RuntimeError, AssertionError):  # the device has been shut down
                self.close()


def _bytes_of(storage: Any, device: torch.device) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))
