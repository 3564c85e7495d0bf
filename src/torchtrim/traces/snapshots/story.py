"""The findings of a memory snapshot: holders of the peak, reserved but unused bytes, helpful settings."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from torchtrim.memory.packing.buffers import Buffer
from torchtrim.memory.packing.packer import pack
from torchtrim.memory.settings import AllocatorSettings, parse_settings
from torchtrim.records.snapshot import Snapshot, SnapshotBlock, SnapshotEvent, frames_of
from torchtrim.records.snapshot_report import (
    Curve,
    DeviceSnapshot,
    Evidence,
    Kind,
    OutOfMemory,
    SettingTried,
    Slack,
    SnapshotHolder,
    SnapshotReport,
)
from torchtrim.traces.snapshots.holders import Place, holders, place_of
from torchtrim.traces.snapshots.recording import Recording, recordings
from torchtrim.traces.snapshots.replay import Replay

SETTINGS = (
    "expandable_segments:True",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:8",
    "garbage_collection_threshold:0.8",
)
_COLUMNS = 400  # Of a chart: about one for every two pixels of a page.
_MOST_FAILURES = 20  # Explained: each takes a replay.
_MOST_PACKED = 20_000  # Requests; packing more takes minutes.


def analyse_snapshot(
    snapshot: Snapshot,
    file: str,
    *,
    settings: tuple[str, ...] = SETTINGS,
    progress: Callable[[str], None] = lambda _: None,
) -> SnapshotReport:
    """Return what the snapshot says. `settings`: values of `PYTORCH_CUDA_ALLOC_CONF` to try.

    Raises `UnreadableInput` if it holds nothing, `UsageError` for a setting that is not modelled.
    """
    tried = {conf: parse_settings(conf) for conf in settings}
    devices, notes = [], []
    for recording in recordings(snapshot):
        if not any(event.action == "alloc" for event in recording.events):
            notes.append(
                f"Device {recording.device} has no events: nothing but its last layout is known. Call "
                "torch.cuda.memory._record_memory_history() before the step."
            )
            continue
        devices.append(_device(recording, tried, progress))
        if (count := len(recording.failures)) > _MOST_FAILURES:
            notes.append(
                f"Device {recording.device} ran out of memory {count:,} times: the first "
                f"{_MOST_FAILURES} are explained."
            )
    return SnapshotReport(file=file, devices=tuple(devices), notes=tuple(notes))


def _device(
    recording: Recording,
    settings: dict[str, AllocatorSettings],
    progress: Callable[[str], None],
) -> DeviceSnapshot:
    name = f"device {recording.device}"
    progress(f"replaying {name}")
    watch = _Watch(recording)
    exact = Replay(recording, recording.settings, exact=True)
    outcome = exact.run(watch.see)
    base = Replay(recording, recording.settings).run()
    rows = [(recording.conf, base)]
    for conf, each in settings.items():
        works = recording.capacity is not None or not each.garbage_collection_threshold
        if each != recording.settings and works:
            rows.append((conf, Replay(recording, each).run()))
    tried = tuple(
        SettingTried(
            conf=conf,
            peak_reserved=found.peak_reserved,
            retries=found.retries,
            device_calls=found.device_calls,
            full=found.full_at is not None,
        )
        for conf, found in rows
    )
    met = {conf: found.met for conf, found in rows[1:]}
    peak = watch.peak_index
    slack, _ = _state_at(recording, watch.reserved_peak_index)
    return DeviceSnapshot(
        device=recording.device,
        events=len(recording.events),
        conf=recording.conf,
        peak_allocated=outcome.peak_allocated,
        peak_event=peak,
        peak_reserved=recording.peak_reserved,
        reserved_at_start=sum(held.size for held in recording.start),
        slack=slack,
        evidence=Evidence(
            allocations=outcome.allocations,
            same=outcome.same,
            device_calls=outcome.device_calls,
            recorded_device_calls=recording.device_calls,
            peak_reserved=outcome.peak_reserved,
            recorded_peak_reserved=recording.peak_reserved,
        ),
        holders=_holders(recording, peak),
        tried=tried,
        ooms=tuple(
            _out_of_memory(recording, index, met) for index in recording.failures[:_MOST_FAILURES]
        ),
        curve=_curve(recording, watch),
        arena=_arena(recording),
    )


class _Watch:
    """Allocated bytes after each event of the exact replay."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.allocated: list[int] = []

    def see(self, allocated: int) -> None:
        self.allocated.append(allocated)

    @property
    def peak_index(self) -> int:
        return max(range(len(self.allocated)), key=self.allocated.__getitem__)

    @property
    def reserved_peak_index(self) -> int:
        reserved = self._recording.reserved
        return max(range(len(reserved)), key=reserved.__getitem__)


class _Live(NamedTuple):
    """A block in use at some event, and what allocated it."""

    size: int
    source: SnapshotEvent | SnapshotBlock | None


def _live_at(recording: Recording, index: int) -> list[_Live]:
    """Return the blocks in use after an event."""
    rounded = recording.settings.rounded
    blocks = {block.address: block for segment in recording.segments for block in segment.blocks}
    live = {
        address: _Live(size, blocks.get(address)) for address, size in recording.live_bytes.items()
    }
    for event in recording.events[: index + 1]:
        if event.action == "alloc":
            live[event.addr] = _Live(rounded(event.size), event)
        elif event.action == "free_completed":
            live.pop(event.addr, None)
    return [*live.values()]


def _holders(recording: Recording, index: int) -> tuple[SnapshotHolder, ...]:
    return holders((_place(each.source), each.size) for each in _live_at(recording, index))


def _place(source: SnapshotEvent | SnapshotBlock | None) -> Place:
    if source is None:
        return Place("held before")
    return place_of(frames_of(source), before=isinstance(source, SnapshotBlock))


def _state_at(recording: Recording, index: int) -> tuple[Slack, list[int]]:
    """Return what is reserved but unused after an event, and the sizes of free pieces."""
    replay = Replay(recording, recording.settings, exact=True)
    replay.run(until=index)
    allocator = replay.allocator
    live = _live_at(recording, index)
    requested = sum(
        each.source.size if isinstance(each.source, SnapshotEvent) else each.size for each in live
    )
    split = allocator.split_sizes()
    free = allocator.free_sizes()
    slack = Slack(
        rounding=max(allocator.allocated - requested, 0),
        split=sum(split),
        pieces=len(split),
        cached=sum(free) - sum(split),
    )
    return slack, free


def _out_of_memory(recording: Recording, index: int, met: dict[str, frozenset[int]]) -> OutOfMemory:
    event = recording.events[index]
    _, free = _state_at(recording, index)
    place = place_of(frames_of(event))
    return OutOfMemory(
        event=index,
        size=event.size,
        device_free=event.device_free or 0,
        allocated=recording.reserved[index] - sum(free),
        reserved=recording.reserved[index],
        cached=sum(free),
        largest=max(free, default=0),
        pieces=len(free),
        place=f"{place.path}:{place.line} {place.function}" if place.path else place.by,
        met_by=tuple(conf for conf, indices in met.items() if index in indices),
    )


def _curve(recording: Recording, watch: _Watch) -> Curve:
    """Return the most bytes of each column, and the kinds at its highest event."""
    count = len(watch.allocated)
    edges = sorted({round(count * column / _COLUMNS) for column in range(_COLUMNS + 1)})
    tops = [
        max(range(first, last), key=watch.allocated.__getitem__) for first, last in pairwise(edges)
    ]
    kinds = _kinds_at(recording, tops)
    return Curve(
        allocated=tuple(watch.allocated[index] for index in tops),
        reserved=tuple(max(recording.reserved[first:last]) for first, last in pairwise(edges)),
        kinds={kind: tuple(values) for kind, values in kinds.items()},
    )


def _kinds_at(recording: Recording, indices: list[int]) -> dict[Kind, list[int]]:
    """Return the bytes of each kind after each of the ascending events."""
    rounded = recording.settings.rounded
    before = recording.live_bytes
    now: dict[Kind, int] = {"held before": sum(before.values())}
    live: dict[int, tuple[Kind, int]] = {
        address: ("held before", size) for address, size in before.items()
    }
    found: dict[Kind, list[int]] = {}
    wanted = 0
    for index, event in enumerate(recording.events):
        if event.action == "alloc":
            kind, size = _place(event).kind, rounded(event.size)
            live[event.addr] = (kind, size)
            now[kind] = now.get(kind, 0) + size
        elif event.action == "free_completed" and event.addr in live:
            kind, size = live.pop(event.addr)
            now[kind] -= size
        while wanted < len(indices) and indices[wanted] == index:
            for kind, size in now.items():
                found.setdefault(kind, [0] * len(indices))[wanted] = size
            wanted += 1
    return found


def _arena(recording: Recording) -> int | None:
    """Return the height of one arena that holds all requests at fixed places."""
    rounded = recording.settings.rounded
    begun = {address: (0, size) for address, size in recording.live_bytes.items()}
    buffers: list[Buffer] = []
    last = len(recording.events) + 1
    for index, event in enumerate(recording.events, 1):
        if event.action == "alloc":
            begun[event.addr] = (index, rounded(event.size))
        elif event.action == "free_completed" and event.addr in begun:
            first, size = begun.pop(event.addr)
            buffers.append(Buffer(len(buffers), first, index, size))
    for first, size in begun.values():
        buffers.append(Buffer(len(buffers), first, last, size))
    if len(buffers) > _MOST_PACKED:
        return None
    return pack(buffers, seconds=0).height
