"""Every call of a trace that synchronizes with the device, or would if the device were behind."""

from __future__ import annotations

from dataclasses import dataclass

from torchtrim.records.trace_events import Event, Trace
from torchtrim.traces.calls import WAITING, Kind, is_between_devices, is_pageable, kind_of
from torchtrim.traces.stacks import CallMoment, Frame, frames_of, lane_of, moments


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """One waiting call. `copy` is what it moves on the device, for a copy.

    `is_sync` says that the call itself synchronizes; else it is an asynchronous copy that blocks because
    its host memory is pageable. `is_device` is a synchronization with the whole device, and
    `is_profiler` one that the profiler made for itself.
    """

    call: Event
    kind: Kind
    copy: Event | None
    moment: CallMoment
    frames: tuple[Frame, ...]
    is_profiler: bool

    @property
    def is_sync(self) -> bool:
        """Whether the call itself synchronizes."""
        return self.kind != "other"

    @property
    def is_pageable(self) -> bool:
        """Whether it copies from or to pageable memory, as the trace tells."""
        return self.copy is not None and is_pageable(self.copy.name)

    @property
    def is_device(self) -> bool:
        """Whether it synchronizes the whole device, as `torch.cuda.synchronize()` does."""
        return self.kind == "device"


def find_waits(trace: Trace) -> list[Wait]:
    """Every waiting call, in the order of their start. What the profiler does for itself is marked."""
    copies = _copies(trace)
    found: list[tuple[Event, Kind, Event | None]] = []
    for call in trace.calls:
        kind = kind_of(call.name)
        copy = copies.get(call.args.correlation) if call.args else None
        if kind in WAITING:
            if kind != "copy" or not _is_between(call, copy):
                found.append((call, kind, copy))
        elif copy is not None and is_pageable(copy.name):
            found.append((call, "other", copy))
    around = moments(trace, (call for call, _, _ in found))
    first, last = _launching(trace)
    waits = []
    for (call, kind, copy), moment in zip(found, around, strict=True):
        frames = tuple(frames_of(moment))
        alone = not moment.frames and not any(map(_is_users, moment.operators))
        own = _in_profiler(frames) or (kind == "device" and alone and not first < call.ts < last)
        waits.append(
            Wait(call=call, kind=kind, copy=copy, moment=moment, frames=frames, is_profiler=own)
        )
    return waits


def unexplained_copies(trace: Trace) -> int:
    """Pageable copies on the device whose call is not in the trace; the host waited for them too."""
    called = {call.args.correlation for call in trace.calls if call.args}
    return sum(
        is_pageable(one.name) and one.args is not None and one.args.correlation not in called
        for one in trace.activities
    )


def _copies(trace: Trace) -> dict[object, Event]:
    return {
        one.args.correlation: one
        for one in trace.activities
        if one.args and one.args.correlation is not None and one.name.startswith("Memcpy")
    }


def _is_between(call: Event, copy: Event | None) -> bool:
    asked = call.args.kind if call.args else None
    return is_between_devices(copy.name if copy is not None else "", asked)


def _launching(trace: Trace) -> tuple[float, float]:
    """When the first and the last call begin that give the device work."""
    numbers = {one.args.correlation for one in trace.activities if one.args}
    times = [c.ts for c in trace.calls if c.args and c.args.correlation in numbers]
    return (min(times, default=0.0), max(times, default=0.0))


def _is_users(operator: Event) -> bool:
    return not operator.name.startswith("ProfilerStep")


def _in_profiler(frames: tuple[Frame, ...]) -> bool:
    return any(frame.is_profiler and not frame.exact for frame in frames)


def same_stand(first: Wait, second: Wait) -> bool:
    """Whether the second is the synchronization that belongs to the first, a copy of the same operator."""
    op = first.moment.innermost
    return (
        first.is_pageable
        and not first.is_sync
        and second.kind == "stream"
        and op is not None
        and op is second.moment.innermost
        and lane_of(first.call) == lane_of(second.call)
    )
