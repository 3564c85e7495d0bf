"""Finds every call of a trace that synchronizes with the device, or would if the device were behind."""

from __future__ import annotations

from dataclasses import dataclass

from torchtrim.records.trace import Event, Trace
from torchtrim.traces.stacks import (
    WAITING,
    CallMoment,
    Frame,
    Kind,
    frames_of,
    is_between_devices,
    is_pageable,
    kind_of,
    lane_of,
    moments,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """One waiting call. `copy` is the device's copy, if the call is one.

    `is_sync`: the call itself synchronizes; else it is an asynchronous copy that blocks because its host
    memory is pageable. `is_device`: it synchronizes the whole device. `is_profiler`: the profiler called it.
    """

    call: Event
    kind: Kind
    copy: Event | None
    moment: CallMoment
    frames: tuple[Frame, ...]
    is_profiler: bool

    @property
    def is_sync(self) -> bool:
        """True if the call itself synchronizes."""
        return self.kind != "other"

    @property
    def is_pageable(self) -> bool:
        """True if the trace shows a copy from or to pageable memory."""
        return self.copy is not None and is_pageable(self.copy.name)

    @property
    def is_device(self) -> bool:
        """True if it synchronizes the whole device, as `torch.cuda.synchronize()` does."""
        return self.kind == "device"


def find_waits(trace: Trace) -> list[Wait]:
    """Return every waiting call in order of start. Calls of the profiler are marked."""
    copies: dict[object, Event] = {
        activity.args.correlation: activity
        for activity in trace.activities
        if activity.args and activity.args.correlation is not None
        if activity.name.startswith("Memcpy")
    }
    calls: list[tuple[Event, Kind, Event | None]] = []
    for call in trace.calls:
        kind = kind_of(call.name)
        copy = copies.get(call.args.correlation) if call.args else None
        if kind in WAITING:
            if kind != "copy" or not _is_between(call, copy):
                calls.append((call, kind, copy))
        elif copy is not None and is_pageable(copy.name):
            calls.append((call, "other", copy))
    around = moments(trace, (call for call, _, _ in calls))
    first, last = _launching(trace)
    waits = []
    for (call, kind, copy), moment in zip(calls, around, strict=True):
        frames = tuple(frames_of(moment))
        users = (op for op in moment.operators if not op.name.startswith("ProfilerStep"))
        alone = not moment.frames and not any(users)
        own = any(frame.is_profiler and not frame.exact for frame in frames)
        own = own or (kind == "device" and alone and not first < call.ts < last)
        waits.append(
            Wait(call=call, kind=kind, copy=copy, moment=moment, frames=frames, is_profiler=own)
        )
    return waits


def unexplained_copies(trace: Trace) -> int:
    """Return pageable copies on the device whose call is missing from the trace; the host waited for them
    too."""
    called = {call.args.correlation for call in trace.calls if call.args}
    return sum(
        is_pageable(copy.name) and copy.args is not None and copy.args.correlation not in called
        for copy in trace.activities
    )


def _is_between(call: Event, copy: Event | None) -> bool:
    kind = call.args.kind if call.args else None
    return is_between_devices(copy.name if copy is not None else "", kind)


def _launching(trace: Trace) -> tuple[float, float]:
    """Return the start times of the first and the last call that give the device work."""
    numbers = {activity.args.correlation for activity in trace.activities if activity.args}
    times = [call.ts for call in trace.calls if call.args and call.args.correlation in numbers]
    return (min(times, default=0.0), max(times, default=0.0))


def same_stand(first: Wait, second: Wait) -> bool:
    """Return True if the second call is the sync that completes the first, a copy of the same operator."""
    op = first.moment.innermost
    return (
        first.is_pageable
        and not first.is_sync
        and second.kind == "stream"
        and op is not None
        and op is second.moment.innermost
        and lane_of(first.call) == lane_of(second.call)
    )
