"""Trace -> replay program: separates what a replay keeps from what it computes again."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median, median_low

from torchtrim.costs.replay import NO_SITE, Activity, Does, ReplayProgram, ReplayStep
from torchtrim.records.trace import Event, Lane, Trace
from torchtrim.traces.launches import (
    SKEW_US,
    DeviceWork,
    Launch,
    Schedule,
    Stream,
    WaitTargets,
    WorkEnds,
    ends,
    is_waiting,
    schedule,
    targets,
)
from torchtrim.traces.stacks import is_pageable, lane_of

_ENGINE = "autograd::engine::evaluate_function"
_RUN_US = 200.0  # Some tens of launches: a shorter burst may follow another by chance.
_NEAR = 0.2  # Arbitrary; threads that take turns leave hardly a gap.
_MOST_ENGINES = 64  # Arbitrary; autograd has one thread for each device of the process.


def hand_overs(trace: Trace, plan: Schedule) -> dict[int, tuple[Lane, float]]:
    """Map the `id` of a launch to the thread that its own had waited for, and the delay after that one
    began.

    A thread of the autograd engine begins when another calls `backward()`, which blocks until the engine is
    done. Other threads take turns if one's burst of calls fills the gap in the other's.
    """
    owners = _engines(trace, plan)
    found: dict[int, tuple[Lane, float]] = {}
    pairs = [(owner, engine, True) for engine, owner in owners.items()]
    pairs += [(a, b, False) for a, b in _others(plan, owners)]
    for first, second, named in pairs:
        both = [launch for launch in plan.launches if launch.lane in (first, second)]
        for run_before, run in _switches(both):
            before, after = run_before[-1], run[0]
            if named or _fills(run_before, run):
                found.setdefault(id(after), (_lane(before), after.time - before.end))
    return found


def _lane(launch: Launch) -> Lane:
    assert launch.lane is not None
    return launch.lane


def _engines(trace: Trace, plan: Schedule) -> dict[Lane, Lane]:
    """Return the threads of the autograd engine, each with the thread that calls it."""
    calls = Counter(launch.lane for launch in plan.launches if launch.lane is not None)
    engines = {lane_of(op) for op in trace.operators if _is_engines(op)}
    forward = [lane for lane, _ in calls.most_common() if lane not in engines]
    marked = _forward_lanes(trace)
    found = {}
    for engine in sorted(engines & calls.keys() - marked)[:_MOST_ENGINES]:
        same = next((lane for lane in forward if lane[0] == engine[0]), None)
        if same is not None:
            found[engine] = same
    return found


def _is_engines(operator: Event) -> bool:
    if operator.name.startswith(_ENGINE):
        return True
    args = operator.args
    return args is not None and bool(args.forward_thread) and args.sequence is not None


def _forward_lanes(trace: Trace) -> set[Lane]:
    """Return the threads that carry the profiler's step marks, never the engine's."""
    marks = (*trace.annotations, *(op for op in trace.operators if op.name.startswith("Profiler")))
    return {lane_of(mark) for mark in marks if mark.name.startswith("ProfilerStep")}


def _others(plan: Schedule, owners: dict[Lane, Lane]) -> list[tuple[Lane, Lane]]:
    calls = Counter(launch.lane for launch in plan.launches if launch.lane is not None)
    lanes = [lane for lane, count in calls.most_common(4) if lane not in owners and count > 8]
    return [(a, b) for i, a in enumerate(lanes) for b in lanes[i + 1 :] if a[0] == b[0]]


def _switches(launches: list[Launch]) -> list[tuple[list[Launch], list[Launch]]]:
    """Return runs of launches of one thread, each with the preceding run of the other thread."""
    runs: list[list[Launch]] = []
    for launch in launches:
        if runs and runs[-1][-1].lane == launch.lane:
            runs[-1].append(launch)
        else:
            runs.append([launch])
    return list(pairwise(runs))


def _fills(before: list[Launch], run: list[Launch]) -> bool:
    """Return True if the run begins right after the one before it, and both are long."""
    lengths = [one[-1].end - one[0].time for one in (before, run)]
    between = run[0].time - before[-1].end
    return min(lengths) > _RUN_US and 0 <= between < _NEAR * min(lengths)


_NEAR_US = 200.0
"""Arbitrary; a longer start or gap has another cause than the machine's latency."""
_IDLE_US = 2.0
"""Arbitrary; most difference between the aligned clocks of host and device."""
_FEWEST = 3  # The fewest with a median that one outlier does not set.
_LAUNCH_US, _GAP_US, _BACK_US = 5.0, 1.5, 5.0


@dataclass(kw_only=True, slots=True)
class Latencies:
    """`launch`: from the call to the start on an idle stream. `gap`: between two activities of a stream.

    `cost`: how long a launching call keeps the host. `back`: from the end of the awaited work to the return
    of the wait. `least`: cost of a waiting call that need not wait. The first three by kind of activity, the
    others by kind of wait.
    """

    launch: dict[str, float]
    gap: dict[str, float]
    cost: dict[str, float]
    back: dict[str, float] = field(default_factory=dict)
    least: dict[str, float] = field(default_factory=dict)

    def launch_of(self, work: DeviceWork) -> float:
        """Return the time from the beginning of the call to the activity's start on an idle stream."""
        return self.launch.get(work.kind, self.launch.get("", _LAUNCH_US))

    def gap_of(self, work: DeviceWork) -> float:
        """Return the time from the previous activity's end on a busy stream to this one's start."""
        return self.gap.get(work.kind, self.gap.get("", _GAP_US))

    def cost_of(self, work: DeviceWork) -> float:
        """Return how long the launching call keeps the host."""
        return self.cost.get(work.kind, self.cost.get("", _LAUNCH_US))

    def back_of(self, kind: str) -> float:
        """Return the time from the end of the awaited work to the return of the call."""
        return self.back.get(kind, _BACK_US)

    def least_of(self, kind: str) -> float:
        """Return the cost of the call if the work is done already."""
        return self.least.get(kind, _LAUNCH_US)


def measure(plan: Schedule) -> Latencies:
    """Measure the latencies of the machine on which the trace was recorded."""
    launch: dict[str, list[float]] = defaultdict(list)
    gap: dict[str, list[float]] = defaultdict(list)
    cost: dict[str, list[float]] = defaultdict(list)
    for work in plan.works:
        call = work.call
        if call is None:
            continue
        cost[work.kind].append(call.dur)
        free = work.before.event.end if work.before is not None else 0.0
        since, idle = work.event.ts - call.ts, work.event.ts - free
        if free + _IDLE_US < call.ts:
            if 0 <= since < _NEAR_US:
                launch[work.kind].append(since)
        elif since > 2 * _LAUNCH_US and -_IDLE_US < idle < _NEAR_US:
            gap[work.kind].append(max(idle, 0.0))
    return Latencies(
        launch=_summary(launch, median),
        gap=_summary(gap, _trimmed),
        cost=_summary(cost, median),
    )


def _summary(samples: dict[str, list[float]], figure: object) -> dict[str, float]:
    assert callable(figure)
    found = {kind: figure(values) for kind, values in samples.items() if len(values) >= _FEWEST}
    every = [value for values in samples.values() for value in values]
    return found | ({"": figure(every)} if every else {})


def _trimmed(values: Iterable[float]) -> float:
    """Return the mean without the highest tenth: many small gaps add up, and outliers have other causes."""
    ordered = sorted(values)
    return fmean(ordered[: max(1, len(ordered) * 9 // 10)])


_NOISE_US = 25.0
"""Arbitrary; a start later than modelled by less is noise, not a dependency."""
_OUTSIDE_US = 50.0
"""Arbitrary; a later return has a cause outside the trace, such as the scheduler."""
_QUEUE = 256  # A queue of launches is never full with fewer; CUDA's holds about a thousand.
_LONG = 20.0  # Arbitrary; a launch that takes twenty times as long as usual was held up.
_LONG_US = 100.0  # Arbitrary; so short a launch was not held up by a full queue.


def build(trace: Trace, sites: Mapping[int, int]) -> ReplayProgram:
    """Build a trace's program. `sites` maps the `id` of a waiting call to its site."""
    plan = schedule(trace)
    return _ProgramBuilder(trace, plan, sites).program()


@dataclass
class _ProgramBuilder:
    trace: Trace
    plan: Schedule
    sites: Mapping[int, int]
    latencies: Latencies = field(init=False)
    targets: WaitTargets = field(init=False)
    ends: WorkEnds = field(init=False)
    lanes: dict[Lane, int] = field(default_factory=dict)
    streams: dict[Stream, int] = field(default_factory=dict)
    steps: list[ReplayStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.latencies = measure(self.plan)
        self.targets = targets(self.trace, self.plan)
        self.ends = ends(self.plan)

    def program(self) -> ReplayProgram:
        """Return all steps, in order of time."""
        self._measure_returns()
        self.targets = targets(self.trace, self.plan)
        handed = hand_overs(self.trace, self.plan)
        for launch in self.plan.launches:
            self._hand_over(launch, handed)
            self._step(launch, id(launch) in handed)
            self.targets.note(launch)
        lanes = list(self.lanes)
        return ReplayProgram(
            steps=self.steps,
            lanes=len(lanes),
            streams=len(self.streams),
            activities=len(self.plan.works),
            tails=self._tails(lanes),
            begin=self.trace.started(),
            end=self.trace.ended(),
        )

    def _measure_returns(self) -> None:
        """Measure the cost of a wait with nothing to await, and the delay of its return otherwise."""
        returns: dict[str, list[float]] = {}
        idle: dict[str, list[float]] = {}
        for launch in self.plan.launches:
            if launch.call is not None and is_waiting(launch) and not launch.works:
                last = max((w.event.end for w in self.targets.of(launch)), default=0.0)
                late = launch.call.end - last
                if last <= launch.call.ts:
                    idle.setdefault(launch.kind, []).append(launch.call.dur)
                elif last > launch.call.ts + SKEW_US and late < _OUTSIDE_US:
                    returns.setdefault(launch.kind, []).append(late)
            self.targets.note(launch)
        self.latencies.back = {kind: median(values) for kind, values in returns.items()}
        self.latencies.least = {
            kind: min(median_low(values), _OUTSIDE_US) for kind, values in idle.items()
        }

    def _hand_over(self, launch: Launch, handed: Mapping[int, tuple[Lane, float]]) -> None:
        found = handed.get(id(launch))
        if found is not None:
            assert launch.lane is not None
            of = self._lane(found[0])
            self.steps.append(
                ReplayStep(Does.HAND_OVER, self._lane(launch.lane), found[1], 0.0, of=of)
            )

    def _step(self, launch: Launch, was_handed: bool) -> None:
        if launch.call is None or launch.lane is None:
            works = tuple(self._outside(work) for work in launch.works)
            self.steps.append(ReplayStep(Does.OUTSIDE, 0, 0.0, 0.0, works))
            return
        lane, gap = self._lane(launch.lane), 0.0 if was_handed else launch.gap
        if launch.works and (is_waiting(launch) or is_pageable(launch.works[0].event.name)):
            self.steps.append(self._copy(launch, lane, gap))
        elif is_waiting(launch):
            self.steps.append(self._wait(launch, lane, gap))
        else:
            self.steps.append(self._launch(launch, lane, gap))

    def _launch(self, launch: Launch, lane: int, gap: float) -> ReplayStep:
        cost = launch.end - launch.time
        full = self._full_queue(launch, cost)
        activities = self._activities(launch)
        if full is None:
            return ReplayStep(Does.LAUNCH, lane, gap, cost, activities)
        usual = min(cost, self.latencies.cost_of(launch.works[0]))
        back = launch.end - full.event.end
        return ReplayStep(Does.WAIT, lane, gap, usual, activities, (full.number,), back)

    def _full_queue(self, launch: Launch, cost: float) -> DeviceWork | None:
        """Return the activity that had to end to make room for another launch, or None if there was room."""
        if not launch.works or cost < max(
            _LONG_US, _LONG * self.latencies.cost_of(launch.works[0])
        ):
            return None
        done = bisect_right(self.ends.times, launch.time)
        if launch.works[0].number - done < _QUEUE:
            return None
        at = bisect_right(self.ends.times, launch.end + SKEW_US)
        last = self.ends.works[at - 1] if at else None
        return last if last is not None and last.number < launch.works[0].number else None

    def _wait(self, launch: Launch, lane: int, gap: float) -> ReplayStep:
        cost = launch.end - launch.time
        awaited = self.targets.of(launch)
        last = max((work.event.end for work in awaited), default=0.0)
        back = self.latencies.back_of(launch.kind)
        least = min(cost, self.latencies.least_of(launch.kind))
        outside = launch.end - max(launch.time + least, last + back)
        return ReplayStep(
            Does.WAIT,
            lane,
            gap,
            least,
            awaits=tuple(work.number for work in awaited),
            back=back,
            outside=outside if outside > _OUTSIDE_US else 0.0,
            site=self.sites.get(id(launch.call), NO_SITE),
        )

    def _copy(self, launch: Launch, lane: int, gap: float) -> ReplayStep:
        cost, work = launch.end - launch.time, launch.works[-1]
        site = self.sites.get(id(launch.call), NO_SITE)
        usual = min(cost, self.latencies.cost_of(work), self.latencies.cost.get("kernel", cost))
        activities = self._activities(launch, keeps=work.event.ts - launch.time)
        back = launch.end - work.event.end
        if work.event.ts > launch.end:
            return ReplayStep(Does.WAIT, lane, gap, cost, activities, site=site, without=usual)
        return ReplayStep(
            Does.COPY,
            lane,
            gap,
            min(cost, usual),
            activities,
            (work.number,),
            back,
            site=site,
            without=usual,
        )

    def _activities(self, launch: Launch, keeps: float | None = None) -> tuple[Activity, ...]:
        ordered = sorted(launch.works, key=lambda work: work.event.ts)
        first = self._first(launch, ordered[0], keeps) if ordered else None
        if first is None:
            return ()
        anchor = ordered[0].event.ts
        return (first, *(self._node(work, first.number, anchor) for work in ordered[1:]))

    def _node(self, work: DeviceWork, anchor: int, time: float) -> Activity:
        stream, event = self._stream(work), work.event
        offset = event.ts - time
        return Activity(work.number, stream, event.dur, 0.0, 0.0, anchor=anchor, offset=offset)

    def _first(self, launch: Launch, work: DeviceWork, keeps: float | None) -> Activity:
        event, before = work.event, work.before
        cost = launch.end - launch.time
        usual = self.latencies.cost_of(work)
        late = cost - usual if cost > _LONG * usual and keeps is None else 0.0
        ready, gap = self.latencies.launch_of(work), self.latencies.gap_of(work)
        if late and event.ts - launch.time < late:
            late = 0.0
        ready += late
        if keeps is not None and (before is None or before.event.end < launch.time):
            ready = max(0.0, keeps)
        free = before.event.end if before is not None else 0.0
        overlap = None
        if before is not None and event.ts < free - SKEW_US:
            overlap, free, gap = event.ts - before.event.ts, event.ts, 0.0
        after = self.targets.ordered_before(launch, work)
        expected = max(launch.time + ready, free + gap, *(one.event.end for one in after), 0.0)
        extra, floor = event.ts - expected, 0.0
        if extra <= _NOISE_US:
            extra = 0.0
        elif (other := self.ends.just_before(work, _NOISE_US)) is not None:
            after, extra = (*after, other), 0.0
        elif before is None:
            extra, floor = 0.0, event.ts
        return Activity(
            work.number,
            self._stream(work),
            event.dur,
            ready,
            gap,
            tuple(one.number for one in after),
            extra,
            overlap,
            floor=floor,
        )

    def _outside(self, work: DeviceWork) -> Activity:
        """Place work without a launch at its recorded time, or behind its predecessor on its stream."""
        event, before = work.event, work.before
        stream = self._stream(work)
        if before is None or before.call is None:
            return Activity(work.number, stream, event.dur, 0.0, 0.0, floor=event.ts)
        gap = event.ts - before.event.end
        overlap = event.ts - before.event.ts if gap < 0 else None
        return Activity(work.number, stream, event.dur, 0.0, gap, overlap=overlap)

    def _tails(self, lanes: list[Lane]) -> list[float]:
        """Return how long each thread went on after its last step.

        Threads with operators but without steps count to the thread with the last step before them.
        """
        last = {one.lane: one.end for one in self.plan.launches if one.lane is not None}
        until = dict.fromkeys(lanes, 0.0)
        others = 0.0
        for events in (self.trace.operators, self.trace.annotations, self.trace.calls):
            for event in events:
                lane = (str(event.pid), str(event.tid))
                if lane in until:
                    until[lane] = max(until[lane], event.end)
                elif events is not self.trace.calls:
                    others = max(others, event.end)
        if lanes:
            latest = max(lanes, key=lambda lane: last[lane])
            until[latest] = max(until[latest], others)
        return [max(0.0, until[lane] - last[lane]) for lane in lanes]

    def _lane(self, lane: Lane) -> int:
        return self.lanes.setdefault(lane, len(self.lanes))

    def _stream(self, work: DeviceWork) -> int:
        return self.streams.setdefault(work.stream, len(self.streams))
