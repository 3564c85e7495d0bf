"""Joins calls of the host with the device activities they launched, and each wait with its work."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

from torchtrim.records.trace import Event, Lane, Number, Trace
from torchtrim.traces.stacks import WAITING, Kind, kind_of, lane_of

Stream = tuple[str, str]


@dataclass(slots=True, eq=False)
class DeviceWork:
    """An activity of a device, its launch number, and its predecessor on its stream."""

    event: Event
    stream: Stream
    call: Event | None
    number: int = -1
    before: DeviceWork | None = None

    @property
    def kind(self) -> str:
        """The key of latencies: `kernel`, `Memcpy HtoD`, `Memcpy DtoH`, `Memcpy DtoD` or `Memset`."""
        name = self.event.name
        if name.startswith("Memcpy "):
            return name[:11]
        return "Memset" if name.startswith("Memset") else "kernel"


@dataclass(slots=True, eq=False)
class Launch:
    """A call, its thread, the launched work, and the end of the host's own work in it.

    `call` is None for work that no call of the trace launched.
    """

    time: float
    lane: Lane | None
    call: Event | None
    kind: Kind
    works: list[DeviceWork]
    end: float
    gap: float = 0.0


@dataclass(kw_only=True)
class Schedule:
    """All launches in order of time, and the work of each stream in launch order."""

    launches: list[Launch]
    works: list[DeviceWork] = field(default_factory=list)
    by_stream: dict[Stream, list[DeviceWork]] = field(default_factory=dict)


def stream_of(event: Event) -> Stream:
    """Return an activity's device and stream."""
    args = event.args
    device = args.device if args and args.device is not None else event.pid
    stream = args.stream if args and args.stream is not None else event.tid
    return (str(device), str(stream))


def schedule(trace: Trace) -> Schedule:
    """Join calls and activities by correlation number."""
    by_number: dict[object, list[Event]] = defaultdict(list)
    loose: list[Event] = []
    for event in trace.activities:
        number = event.args.correlation if event.args else None
        (loose if number is None else by_number[number]).append(event)
    launches = _called(trace, by_number)
    launches += _uncalled([*loose, *chain(*by_number.values())], launches)
    launches.sort(key=lambda launch: (launch.time, launch.call is not None))
    plan = Schedule(launches=launches)
    for launch in launches:
        for work in launch.works:
            work.number = len(plan.works)
            plan.works.append(work)
            here = plan.by_stream.setdefault(work.stream, [])
            work.before = here[-1] if here else None
            here.append(work)
    return plan


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
    """Return work without a launching call, placed before the next start on its stream.

    The first work of a stream was launched before the trace began.
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
    for stream, launches in by_stream.items():
        later = sorted(starts[stream])
        first, latest = later[0][0] if later else float("inf"), float("inf")
        launches.sort(key=lambda launch: launch.time)
        for launch in reversed(launches):
            while later and later[-1][0] >= launch.time:
                latest = min(latest, later.pop()[1])
            launch.time = 0.0 if launch.time < first else min(launch.time, latest)
    return list(chain(*by_stream.values()))


def is_waiting(launch: Launch) -> bool:
    """Return True if the host waits in the call."""
    return launch.kind in WAITING


SKEW_US = 5.0  # Arbitrary; most difference between the clocks of host and device in a trace.
_NEAR_US = 60.0  # Arbitrary; most time from the end of awaited work to the return of the wait.
_FURTHEST = 4096  # Arbitrary; bounds the way back along a stream.


@dataclass(kw_only=True)
class WaitTargets:
    """The launches so far, by thread and stream, and the work that each wait needs.

    Launches are noted in order, so at each one the earlier ones are known.
    """

    recorded_waits: Mapping[Number, Event]
    last: dict[Stream, DeviceWork] = field(default_factory=dict)
    by_lane: dict[Lane | None, DeviceWork] = field(default_factory=dict)
    recorded: dict[Lane | None, DeviceWork] = field(default_factory=dict)
    records: dict[object, DeviceWork] = field(default_factory=dict)
    ordered: dict[Lane | None, list[DeviceWork]] = field(default_factory=lambda: defaultdict(list))

    def note(self, launch: Launch) -> None:
        """Add a launch."""
        for work in launch.works:
            self.last[work.stream] = work
            self.by_lane[launch.lane] = work
        before = self.by_lane.get(launch.lane)
        if before is None or launch.call is None:
            return
        if launch.kind == "record":
            self.recorded[launch.lane] = before
            if launch.call.args:
                self.records[launch.call.args.correlation] = before
        elif launch.kind == "order":
            self.ordered[launch.lane].append(self.recorded.get(launch.lane, before))

    def ordered_before(self, launch: Launch, work: DeviceWork) -> tuple[DeviceWork, ...]:
        """Return the work that earlier `cudaStreamWaitEvent` calls order before this launch, on other
        streams.

        Most traces contain neither the event nor the stream. PyTorch records an event on the stream that it
        leaves and makes the next stream wait for it, so take the last work of the former stream, unless the
        recorded times show that it ended later.
        """
        return tuple(
            before
            for before in dict.fromkeys(self.ordered.pop(launch.lane, ()))
            if before.stream != work.stream and before.event.end <= work.event.ts + SKEW_US
        )

    def of(self, launch: Launch) -> list[DeviceWork]:
        """Return the last activity of each stream that this waiting call needs."""
        assert launch.call is not None
        if launch.kind == "device":
            return self._ended(list(self.last.values()), launch.call)
        awaited = self._event if launch.kind == "event" else self._stream
        work = awaited(launch, launch.call)
        return self._ended([work] if work is not None else [], launch.call)

    def _stream(self, launch: Launch, call: Event) -> DeviceWork | None:
        wait = self._recorded_wait(call)
        if wait is not None and wait.args and wait.args.stream not in (None, -1):
            return self.last.get(stream_of(wait))
        mine = self.by_lane.get(launch.lane)
        if mine is not None and mine.event.name.startswith("Memcpy"):
            return mine
        return self._nearest(call, self.last.get(mine.stream) if mine else None)

    def _event(self, launch: Launch, call: Event) -> DeviceWork | None:
        wait = self._recorded_wait(call)
        if wait is not None and wait.args and wait.args.wait_record in self.records:
            return self.records[wait.args.wait_record]
        return self._nearest(call, self.recorded.get(launch.lane))

    def _recorded_wait(self, call: Event) -> Event | None:
        number = call.args.correlation if call.args else None
        return self.recorded_waits.get(number) if number is not None else None

    def _nearest(self, call: Event, likely: DeviceWork | None) -> DeviceWork | None:
        """Return `likely`, unless another stream's last activity explains the return of the call much
        better."""
        if likely is not None and _explains(likely, call):
            return likely
        others = [work for work in self.last.values() if _explains(work, call)]
        if others and call.dur > _NEAR_US:
            return max(others, key=lambda work: work.event.end)
        return likely

    def _ended(self, works: list[DeviceWork], call: Event) -> list[DeviceWork]:
        """Step back on each stream over activities that ended only after the call returned."""
        ended, latest = [], call.end + SKEW_US
        for work in works:
            before: DeviceWork | None = work
            for _ in range(_FURTHEST):
                if before is None or before.event.end <= latest or before.event.ts <= call.ts:
                    break
                before = before.before
            if before is not None and before.event.end <= latest:
                ended.append(before)
        return ended


def _explains(work: DeviceWork, call: Event) -> bool:
    return call.end - _NEAR_US <= work.event.end <= call.end + SKEW_US


def targets(trace: Trace) -> WaitTargets:
    """Return the wait targets of this trace, before its first launch."""
    return WaitTargets(
        recorded_waits={wait.args.correlation: wait for wait in trace.waits if wait.args}
    )


@dataclass(kw_only=True)
class WorkEnds:
    """Ends of activities, to find the one that another may have waited for."""

    works: list[DeviceWork]
    times: list[float]

    def just_before(self, work: DeviceWork, within: float) -> DeviceWork | None:
        """Return an activity of another stream, launched earlier, that ended just before this one started."""
        at = bisect_right(self.times, work.event.ts + SKEW_US)
        while at > 0 and self.times[at - 1] >= work.event.ts - within:
            at -= 1
            other = self.works[at]
            if other.stream != work.stream and other.number < work.number:
                return other
        return None


def ends(plan: Schedule) -> WorkEnds:
    """Index all activities by their end times."""
    works = sorted(plan.works, key=lambda work: work.event.end)
    return WorkEnds(works=works, times=[work.event.end for work in works])
