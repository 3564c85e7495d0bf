"""The part of a memory snapshot for one device: the layout before its first event, and what followed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

from torchtrim.errors import UnreadableInput, UsageError
from torchtrim.memory.caching import SMALL_SEGMENT
from torchtrim.memory.settings import AllocatorSettings, parse_settings
from torchtrim.records.snapshot import Snapshot, SnapshotEvent, SnapshotSegment

_PAGE = SMALL_SEGMENT  # Pages of large ranges are multiples of it.
_TAKES, _GIVES = {"segment_alloc", "segment_map"}, {"segment_free", "segment_unmap"}


class Held(NamedTuple):
    """A segment, or a run of mapped pages, from before the first event."""

    address: int
    size: int
    stream: int
    private: int
    small: bool
    expandable: bool

    @property
    def end(self) -> int:
        """The address after its last byte."""
        return self.address + self.size


class Live(NamedTuple):
    """A block in use before the first event. `requested`: False where only its rounded size is known."""

    size: int
    requested: bool


class Recording:
    """One device of a snapshot."""

    def __init__(self, snapshot: Snapshot, device: int) -> None:
        self.device = device
        self.events = snapshot.device_traces[device] if snapshot.device_traces else []
        self.segments = [each for each in snapshot.segments if each.device == device]
        self.conf = snapshot.conf

    @cached_property
    def settings(self) -> AllocatorSettings:
        """The allocator's settings; the defaults where they are not known or not modelled."""
        try:
            return parse_settings(self.conf)
        except UsageError:
            return AllocatorSettings(expandable_segments="expandable_segments:True" in self.conf)

    @cached_property
    def start(self) -> list[Held]:
        """The blocks held before the first event: the ones held at the end, less taken, plus given back."""
        taken: dict[int, SnapshotEvent] = {}
        given: list[SnapshotEvent] = []
        for event in self.events:
            if event.action == "segment_alloc":
                taken[event.addr] = event
            elif event.action == "segment_free" and taken.pop(event.addr, None) is None:
                given.append(event)
        held = [
            _held(segment)
            for segment in self.segments
            if not segment.is_expandable and segment.address not in taken
        ]
        for event in given:
            small = event.size == SMALL_SEGMENT
            held.append(Held(event.addr, event.size, event.stream, 0, small, False))
        return sorted([*held, *self._mapped_at_start()])

    def check(self) -> None:
        """Raise `UnreadableInput` where memory is taken that is held already."""
        held: list[tuple[int, int]] = []
        for each in self.start:
            self._take(held, each.address, each.end)
        for event in self.events:
            end = event.addr + event.size
            if event.action in _TAKES:
                self._take(held, event.addr, end)
            elif event.action in _GIVES:
                first = bisect_right(held, event.addr, key=itemgetter(1))
                last = bisect_left(held, end, key=itemgetter(0))
                cut = [(a, min(b, event.addr)) for a, b in held[first:last]]
                cut += [(max(a, end), b) for a, b in held[first:last]]
                held[first:last] = sorted(one for one in cut if one[0] < one[1])

    def _take(self, held: list[tuple[int, int]], address: int, end: int) -> None:
        at = bisect_right(held, address, key=itemgetter(1))
        if at < len(held) and held[at][0] < end:
            raise UnreadableInput(
                f"the snapshot is damaged: device {self.device} takes address {address:#x}, which it holds. "
                "Write it again with torch.cuda.memory._dump_snapshot."
            )
        held.insert(at, (address, end))

    def _mapped_at_start(self) -> Iterator[Held]:
        """Yield runs of pages that were mapped before the first event."""
        pages: dict[int, tuple[int, int, bool]] = {}
        for segment in self.segments:
            if segment.is_expandable:
                kind = (segment.stream, _private(segment), segment.segment_type == "small")
                pages |= dict.fromkeys(_pages(segment.address, segment.total_size), kind)
        for event in reversed(self.events):
            if event.action == "segment_map":
                for page in _pages(event.addr, event.size):
                    pages.pop(page, None)
            elif event.action == "segment_unmap":
                kind = (event.stream, 0, event.size == SMALL_SEGMENT)
                pages |= dict.fromkeys(_pages(event.addr, event.size), kind)
        for address, size, (stream, private, small) in _runs(pages):
            yield Held(address, size, stream, private, small, True)

    @cached_property
    def live(self) -> dict[int, Live]:
        """Blocks in use before the first event, by address: freed without an allocation, or never freed."""
        since: set[int] = set()
        live: dict[int, Live] = {}
        for event in self.events:
            if event.action == "alloc":
                since.add(event.addr)
            elif event.action == "free_completed":
                if event.addr not in since:
                    live[event.addr] = Live(event.size, requested=True)
                since.discard(event.addr)
        for segment in self.segments:
            for block in segment.blocks:
                if block.active and block.address not in since:
                    live[block.address] = Live(block.size, requested=False)
        return live

    @cached_property
    def live_bytes(self) -> dict[int, int]:
        """The bytes that each block in use before the first event takes, by address."""
        return {
            address: self.settings.rounded(each.size) if each.requested else each.size
            for address, each in self.live.items()
        }

    @cached_property
    def reserved(self) -> list[int]:
        """The bytes held after each event."""
        now = sum(each.size for each in self.start)
        found = []
        for event in self.events:
            if event.action in _TAKES:
                now += event.size
            elif event.action in _GIVES:
                now -= event.size
            found.append(now)
        return found

    @property
    def peak_reserved(self) -> int:
        """The most bytes that were held."""
        return max([sum(each.size for each in self.start), *self.reserved])

    @property
    def failures(self) -> list[int]:
        """Indices of requests that failed for want of memory."""
        return [index for index, event in enumerate(self.events) if event.action == "oom"]

    @property
    def device_calls(self) -> int:
        """The number of allocations from the device."""
        return sum(event.action in _TAKES for event in self.events)

    def private_of(self, address: int) -> int:
        """Return the private pool of an address, 0 for the default one."""
        return self._private.get(address // _PAGE, 0)

    @cached_property
    def _private(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for segment in self.segments:
            if private := _private(segment):
                first, last = segment.address, segment.address + segment.total_size - 1
                found |= dict.fromkeys(range(first // _PAGE, last // _PAGE + 1), private)
        return found

    @cached_property
    def under_pressure(self) -> set[int]:
        """Indices of events that gave memory back because an allocation did not fit.

        An allocation follows them directly, and at no time was as much held as it would have needed without.
        """
        found: set[int] = set()
        run: list[int] = []
        for index, event in enumerate(self.events):
            if event.action in _GIVES:
                run.append(index)
                continue
            if run and (event.action in _TAKES or event.action == "oom"):
                before = self.reserved[run[0]] + self.events[run[0]].size
                if before + event.size > self.peak_reserved:
                    found |= {*run}
            run = []
        return found

    @cached_property
    def capacity(self) -> int | None:
        """The bytes that the allocator could hold, or None where it never reached them."""
        full = [
            self.reserved[index] + (event.device_free or 0)
            for index, event in enumerate(self.events)
            if event.action == "oom"
        ]
        return max(full, default=self.peak_reserved if self.under_pressure else None)


def recordings(snapshot: Snapshot) -> list[Recording]:
    """Return the devices of a snapshot that have segments or events. Raises `UnreadableInput` if none has."""
    used = {segment.device for segment in snapshot.segments}
    used |= {device for device, events in enumerate(snapshot.device_traces) if events}
    count = max(len(snapshot.device_traces), 1)
    if not used or not all(0 <= device < count for device in used):
        raise UnreadableInput(
            "the snapshot holds no segment and no event. Call "
            "torch.cuda.memory._record_memory_history() first, then run a step, then dump."
        )
    found = [Recording(snapshot, device) for device in sorted(used)]
    for recording in found:
        recording.check()
    return found


def _held(segment: SnapshotSegment) -> Held:
    return Held(
        segment.address,
        segment.total_size,
        segment.stream,
        _private(segment),
        segment.segment_type == "small",
        segment.is_expandable,
    )


def _private(segment: SnapshotSegment) -> int:
    """Return one number for the pool that the user or a CUDA graph made, 0 for the default one."""
    first, second = segment.segment_pool_id
    return first * 2**32 + second


def _pages(address: int, size: int) -> range:
    return range(address, address + size, _PAGE)


def _runs(
    pages: dict[int, tuple[int, int, bool]],
) -> Iterator[tuple[int, int, tuple[int, int, bool]]]:
    """Yield runs of adjacent pages of one kind: address, bytes, kind."""
    by_kind: dict[tuple[int, int, bool], list[int]] = defaultdict(list)
    for page, kind in sorted(pages.items()):
        by_kind[kind].append(page)
    for kind, addresses in by_kind.items():
        first = last = addresses[0]
        for address in addresses[1:]:
            if address != last + _PAGE:
                yield first, last + _PAGE - first, kind
                first = address
            last = address
        yield first, last + _PAGE - first, kind
