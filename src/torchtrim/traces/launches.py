"""Which call launched which work: calls of the host and activities of the device, joined and numbered."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from torchtrim.records.trace_events import Event, Lane, Trace
from torchtrim.traces.calls import WAITING, Kind, kind_of
from torchtrim.traces.stacks import lane_of

Stream = tuple[str, str]


@dataclass(slots=True, eq=False)
class DeviceWork:
    """An activity of a device, the number in which it was launched, and what was before it on its stream."""

    event: Event
    stream: Stream
    call: Event | None
    number: int = -1
    before: DeviceWork | None = None

    @property
    def kind(self) -> str:
        """`kernel`, `Memcpy HtoD`, `Memcpy DtoH`, `Memcpy DtoD` or `Memset`: what latencies go by."""
        name = self.event.name
        if name.startswith("Memcpy "):
            return name[:11]
        return "Memset" if name.startswith("Memset") else "kernel"


@dataclass(slots=True, eq=False)
class Launch:
    """A call that matters, its thread, what it launched, and the end of the host's own work in it.

    `call` is None for work that no call of the trace launched.
    """

    time: float
    lane: Lane | None
    call: Event | None
    kind: Kind
    works: list[DeviceWork]
    end: float
    gap: float = 0.0
    hands_over: tuple[Lane, float] | None = None


@dataclass(kw_only=True)
class Schedule:
    """All launches in the order of their time, and the work of each stream in the order of launching."""

    launches: list[Launch]
    works: list[DeviceWork] = field(default_factory=list)
    by_stream: dict[Stream, list[DeviceWork]] = field(default_factory=dict)


def stream_of(event: Event) -> Stream:
    """Device and stream of an activity."""
    args = event.args
    device = args.device if args and args.device is not None else event.pid
    stream = args.stream if args and args.stream is not None else event.tid
    return (str(device), str(stream))


def schedule(trace: Trace) -> Schedule:
    """Join calls and activities by their correlation numbers."""
    by_number: dict[object, list[Event]] = defaultdict(list)
    loose: list[Event] = []
    for event in trace.activities:
        number = event.args.correlation if event.args else None
        (loose if number is None else by_number[number]).append(event)
    launches = _called(trace, by_number)
    launches += _uncalled(
        [event for rest in (loose, *by_number.values()) for event in rest], launches
    )
    launches.sort(key=lambda launch: (launch.time, launch.call is not None))
    found = Schedule(launches=launches)
    for launch in launches:
        for work in launch.works:
            work.number = len(found.works)
            found.works.append(work)
            here = found.by_stream.setdefault(work.stream, [])
            work.before = here[-1] if here else None
            here.append(work)
    return found


def _called(trace: Trace, by_number: dict[object, list[Event]]) -> list[Launch]:
    launches = []
    last: dict[Lane, Launch] = {}
    for call in trace.calls:
        kind = kind_of(call.name)
        number = call.args.correlation if call.args else None
        events = by_number.pop(number, None) if number is not None else None
        if events is None and kind == "other":
            continue
        lane = lane_of(call)
        works = [DeviceWork(event, stream_of(event), call) for event in events or ()]
        launch = Launch(call.ts, lane, call, kind, works, call.end)
        before = last.get(lane)
        if before is not None and before.end > call.ts:
            before.end = call.ts
        launch.gap = call.ts - (before.end if before is not None else 0.0)
        last[lane] = launch
        launches.append(launch)
    return launches


def _uncalled(events: list[Event], called: list[Launch]) -> list[Launch]:
    """Work that no call in the trace launched, placed before what started after it on its stream.

    What comes before all else on its stream was launched before the trace began.
    """
    by_stream: dict[Stream, list[Launch]] = defaultdict(list)
    for event in events:
        work = DeviceWork(event, stream_of(event), None)
        launch = Launch(event.ts, None, None, "other", [work], event.end)
        by_stream[work.stream].append(launch)
    starts: dict[Stream, list[tuple[float, float]]] = defaultdict(list)
    for launch in called if by_stream else ():
        for work in launch.works:
            if work.stream in by_stream:
                starts[work.stream].append((work.event.ts, launch.time))
    for stream, found in by_stream.items():
        later = sorted(starts[stream])
        first, latest = later[0][0] if later else float("inf"), float("inf")
        found.sort(key=lambda launch: launch.time)
        for launch in reversed(found):
            while later and later[-1][0] >= launch.time:
                latest = min(latest, later.pop()[1])
            launch.time = 0.0 if launch.time < first else min(launch.time, latest)
    return [launch for found in by_stream.values() for launch in found]


def is_waiting(launch: Launch) -> bool:
    """Whether the host waits in it."""
    return launch.kind in WAITING
