"""Which activities a waiting call waited for. Read from the trace where it tells, else inferred from it."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchtrim.records.trace_events import Event, Lane, Number, Trace
from torchtrim.traces.launches import DeviceWork, Launch, Schedule, Stream, stream_of

SKEW_US = 5.0  # By how much clocks of host and device may differ in a trace. Arbitrary.
_NEAR_US = 60.0  # Arbitrary; how long before a wait returns what it awaited may have ended.
_FURTHEST = 4096  # Arbitrary; bounds the way back along a stream.


@dataclass(kw_only=True)
class WaitTargets:
    """Launches until now, by thread and stream, and the work that each wait needs.

    Launches are shown to it in their order, so that it knows at each what came before.
    """

    schedule: Schedule
    told: Mapping[Number, Event]
    last: dict[Stream, DeviceWork] = field(default_factory=dict)
    by_lane: dict[Lane | None, DeviceWork] = field(default_factory=dict)
    recorded: dict[Lane | None, DeviceWork] = field(default_factory=dict)
    records: dict[object, DeviceWork] = field(default_factory=dict)
    ordered: dict[Lane | None, list[DeviceWork]] = field(default_factory=lambda: defaultdict(list))

    def note(self, launch: Launch) -> None:
        """Take a launch in."""
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
        """What `cudaStreamWaitEvent` calls before this launch put before it, on other streams.

        Neither the event nor the stream is in most traces. PyTorch records an event on the stream that it
        leaves and orders the next stream after it, so the last work of the stream that was left is
        taken, unless the recorded times say that it ended later.
        """
        pending = self.ordered.pop(launch.lane, None)
        if not pending:
            return ()
        return tuple(
            one
            for one in dict.fromkeys(pending)
            if one.stream != work.stream and one.event.end <= work.event.ts + SKEW_US
        )

    def of(self, launch: Launch) -> list[DeviceWork]:
        """The work that this waiting call needs: on each stream the last such activity."""
        assert launch.call is not None
        if launch.kind == "device":
            return self._ended(list(self.last.values()), launch.call)
        if launch.kind == "event":
            return self._ended(self._event(launch), launch.call)
        return self._ended(self._stream(launch), launch.call)

    def _stream(self, launch: Launch) -> list[DeviceWork]:
        assert launch.call is not None
        told = self._told(launch.call)
        if told is not None and told.args and told.args.stream not in (None, -1):
            here = self.last.get(stream_of(told))
            return [here] if here is not None else []
        mine = self.by_lane.get(launch.lane)
        if mine is not None and mine.event.name.startswith("Memcpy"):
            return [mine]
        return self._nearest(launch.call, self.last.get(mine.stream) if mine else None)

    def _event(self, launch: Launch) -> list[DeviceWork]:
        assert launch.call is not None
        told = self._told(launch.call)
        if told is not None and told.args and told.args.wait_record in self.records:
            return [self.records[told.args.wait_record]]
        return self._nearest(launch.call, self.recorded.get(launch.lane))

    def _told(self, call: Event) -> Event | None:
        number = call.args.correlation if call.args else None
        return self.told.get(number) if number is not None else None

    def _nearest(self, call: Event, likely: DeviceWork | None) -> list[DeviceWork]:
        """`likely`, unless another stream's last activity explains much better when the call returned."""
        if likely is not None and _explains(likely, call):
            return [likely]
        others = [work for work in self.last.values() if _explains(work, call)]
        if others and call.dur > _NEAR_US:
            return [max(others, key=lambda work: work.event.end)]
        return [likely] if likely is not None else []

    def _ended(self, works: list[DeviceWork], call: Event) -> list[DeviceWork]:
        """The same, stepping back on each stream over what ended only after the call had returned."""
        found = []
        for work in works:
            one: DeviceWork | None = work
            for _ in range(_FURTHEST):
                if one is None or one.event.end <= call.end + SKEW_US or one.event.ts <= call.ts:
                    break
                one = one.before
            if one is not None and one.event.end <= call.end + SKEW_US:
                found.append(one)
        return found


def _explains(work: DeviceWork, call: Event) -> bool:
    return call.end - _NEAR_US <= work.event.end <= call.end + SKEW_US


def targets(trace: Trace, plan: Schedule) -> WaitTargets:
    """A finder for this trace, before its first launch."""
    told = {wait.args.correlation: wait for wait in trace.waits if wait.args}
    return WaitTargets(schedule=plan, told=told)


@dataclass(kw_only=True)
class WorkEnds:
    """When activities ended, to find the one that another may have waited for."""

    works: list[DeviceWork]
    times: list[float]

    def just_before(self, work: DeviceWork, within: float) -> DeviceWork | None:
        """An activity of another stream, launched before, that ended just before this one started."""
        at = bisect_right(self.times, work.event.ts + SKEW_US)
        while at > 0 and self.times[at - 1] >= work.event.ts - within:
            at -= 1
            other = self.works[at]
            if other.stream != work.stream and other.number < work.number:
                return other
        return None


def ends(plan: Schedule) -> WorkEnds:
    """All activities by the time at which they ended."""
    works = sorted(plan.works, key=lambda work: work.event.end)
    return WorkEnds(works=works, times=[work.event.end for work in works])
