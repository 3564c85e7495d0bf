"""Replays the requests of a memory snapshot through a model of the allocator, under any settings."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from torchtrim.memory.caching import SMALL, CachedBlock, CachingAllocator, DeviceFull
from torchtrim.memory.settings import AllocatorSettings
from torchtrim.records.snapshot import SnapshotEvent
from torchtrim.traces.snapshots.recording import Held, Recording

_ELSEWHERE = 2**60  # Beyond all addresses of devices.


class Replayed(NamedTuple):
    """The outcome of a replay. `same`: allocations at the recorded address; `full_at`: the event that failed.

    `met`: recorded failures that found room.
    """

    peak_allocated: int
    peak_reserved: int
    device_calls: int
    retries: int
    allocations: int
    same: int
    full_at: int | None
    met: frozenset[int]


class Replay:
    """One replay. `exact`: from the recorded layout, at the recorded addresses; else from an empty cache."""

    def __init__(
        self, recording: Recording, settings: AllocatorSettings, *, exact: bool = False
    ) -> None:
        self._recording, self._exact = recording, exact
        self._new = _new_segments(recording) if exact else {}
        self._ranges = deque(_new_ranges(recording)) if exact else deque[int]()
        self._beyond = _ELSEWHERE
        self._handles: dict[int, int] = {}
        self._allocations = self._same = 0
        self._met: set[int] = set()
        capacity = None if exact else recording.capacity
        self.allocator = CachingAllocator(settings, capacity, self._place)

    def run(
        self, see: Callable[[int], None] = lambda _: None, *, until: int | None = None
    ) -> Replayed:
        """Replay the events, up to and including `until`. `see`: told the allocated bytes after each."""
        self._begin()
        allocator = self.allocator
        allocator.reset_peaks()
        calls = allocator.segments + allocator.mapped
        full_at = None
        events = self._recording.events
        for index, event in enumerate(events if until is None else events[: until + 1]):
            try:
                self._step(index, event)
            except DeviceFull:
                full_at = index
                break
            see(allocator.allocated)
        return Replayed(
            allocator.peak_allocated,
            allocator.peak_reserved,
            allocator.segments + allocator.mapped - calls,
            allocator.retries,
            self._allocations,
            self._same,
            full_at,
            frozenset(self._met),
        )

    def _step(self, index: int, event: SnapshotEvent) -> None:
        allocator = self.allocator
        if event.action == "alloc":
            private = self._recording.private_of(event.addr)
            handle = allocator.malloc(event.size, event.stream, private)
            self._handles[event.addr] = handle
            self._allocations += 1
            self._same += allocator.address(handle) == event.addr
        elif event.action == "free_completed":
            if (found := self._handles.pop(event.addr, None)) is not None:
                allocator.free(found)
        elif event.action in {"segment_free", "segment_unmap"}:
            self._give_back(index)
        elif event.action == "oom" and not self._exact:
            with suppress(DeviceFull):
                allocator.free(allocator.malloc(event.size, event.stream))
                self._met.add(index)

    def _place(self, size: int) -> int:
        """Return the recorded address of the next segment of this size, or one beyond all of them."""
        if self.allocator.settings.expandable_segments and self._ranges:
            return self._ranges.popleft()
        if places := self._new.get(size):
            return places.popleft()
        self._beyond += 2**44
        return self._beyond

    def _give_back(self, index: int) -> None:
        """Release what the recorded event did; under other settings, only what was emptied on request."""
        event = self._recording.events[index]
        pressed = index in self._recording.under_pressure
        if self._exact and event.action == "segment_free":
            self.allocator.release(event.addr)
        elif self._exact or not pressed:
            self.allocator.empty_cache()

    def _begin(self) -> None:
        """Take what was in use before the first event."""
        if self._exact:
            ranges: dict[tuple[int, int, bool], list[Held]] = defaultdict(list)
            for held in self._recording.start:
                if held.expandable:
                    ranges[held.stream, held.private, held.small].append(held)
                else:
                    self._lay_out(held)
            for runs in ranges.values():
                for held in runs:
                    self._lay_out(held, runs[0].address)
            return
        for address, live in sorted(self._recording.live.items()):
            private = self._recording.private_of(address)
            stream = self._stream_of(address)
            try:
                self._handles[address] = self.allocator.malloc(live.size, stream, private)
            except DeviceFull:
                continue

    def _stream_of(self, address: int) -> int:
        starts = self._recording.start
        at = bisect_left(starts, address + 1, key=lambda held: held.address) - 1
        return starts[at].stream if at >= 0 else 0

    def _lay_out(self, held: Held, range_start: int | None = None) -> None:
        """Put a segment with its blocks into the allocator as they lay before the first event."""
        allocator = self.allocator
        pool = allocator.pool(held.stream, held.small, held.private)
        allocator.hold(held.size)
        last: CachedBlock | None = None
        for address, size, used in self._blocks(held):
            block = CachedBlock(
                pool, address, size, free=not used, range_start=range_start, before=last
            )
            if last is not None:
                last.after = block
            last = block
            if used:
                self._handles[address] = allocator.adopt(block)
            else:
                pool.put(block)
        if range_start is not None and last is not None:
            allocator.extend(last)

    def _blocks(self, held: Held) -> list[tuple[int, int, bool]]:
        """Return address, bytes and use of the blocks of a segment. A rest too small to split is slack."""
        recording = self._recording
        least = 0 if held.small or held.expandable else SMALL
        found: list[tuple[int, int, bool]] = []
        at = held.address
        addresses = self._addresses_in(held)
        for address, following in zip(addresses, [*addresses[1:], held.end], strict=False):
            self._gap(found, at, address, least)
            size = min(recording.live_bytes[address], following - address)
            found.append((address, size, True))
            at = address + size
        self._gap(found, at, held.end, least)
        return found

    @staticmethod
    def _gap(found: list[tuple[int, int, bool]], at: int, end: int, least: int) -> None:
        if end <= at:
            return
        if end - at <= least and found:
            address, size, used = found[-1]
            found[-1] = (address, size + end - at, used)
        else:
            found.append((at, end - at, False))

    def _addresses_in(self, held: Held) -> list[int]:
        live = self._sorted_live
        return live[bisect_left(live, held.address) : bisect_left(live, held.end)]

    @property
    def _sorted_live(self) -> list[int]:
        if not hasattr(self, "_live"):
            self._live = sorted(self._recording.live)
        return self._live


def _new_segments(recording: Recording) -> dict[int, deque[int]]:
    """Return the addresses of the segments that were made, in order, by their size."""
    found: dict[int, deque[int]] = defaultdict(deque)
    for event in recording.events:
        if event.action == "segment_alloc":
            found[event.size].append(event.addr)
    return found


def _new_ranges(recording: Recording) -> list[int]:
    """Return where ranges begin that were made: pages that are next to none before them."""
    ends = {held.end for held in recording.start if held.expandable}
    found = []
    for event in recording.events:
        if event.action == "segment_map":
            if event.addr not in ends:
                found.append(event.addr)
            ends.add(event.addr + event.size)
    return found
