"""Trace -> replay program: separates recorded times that a replay keeps from those it computes again."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations, groupby, pairwise
from statistics import fmean, median, median_low
from typing import Literal

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
    """Map the `id` of a launch to the thread that its own waited for, and the delay between the two.

    A thread of the autograd engine begins when another calls `backward()`, which blocks until the engine is
    done. Other threads take turns if one's burst of calls fills the gap in the other's.
    """
    calls = Counter(launch.lane for launch in plan.launches if launch.lane is not None)
    owners = _engines(trace, calls)
    pairs = [(owner, engine, True) for engine, owner in owners.items()]
    busy = [lane for lane, count in calls.most_common(4) if lane not in owners and count > 8]
    pairs += [(a, b, False) for a, b in combinations(busy, 2) if a[0] == b[0]]
    handed: dict[int, tuple[Lane, float]] = {}
    for first, second, is_engine in pairs:
        both = (launch for launch in plan.launches if launch.lane in (first, second))
        runs = [list(run) for _, run in groupby(both, key=lambda launch: launch.lane)]
        for run_before, run in pairwise(runs):
            before, after = run_before[-1], run[0]
            if before.lane is not None and (is_engine or _fills(run_before, run)):
                handed.setdefault(id(after), (before.lane, after.time - before.end))
    return handed


def _engines(trace: Trace, calls: Counter[Lane]) -> dict[Lane, Lane]:
    """Return the threads of the autograd engine, each with the thread that calls it."""
    engines = {lane_of(op) for op in trace.operators if _is_engines(op)}
    forward = [lane for lane, _ in calls.most_common() if lane not in engines]
    # The profiler's step marks are never on the engine's threads.
    marks = (*trace.annotations, *trace.operators)
    marked = {lane_of(mark) for mark in marks if mark.name.startswith("ProfilerStep")}
    owners = {}
    for engine in sorted(engines & calls.keys() - marked)[:_MOST_ENGINES]:
        owner = next((lane for lane in forward if lane[0] == engine[0]), None)
        if owner is not None:
            owners[engine] = owner
    return owners


def _is_engines(operator: Event) -> bool:
    if operator.name.startswith(_ENGINE):
        return True
    args = operator.args
    return args is not None and bool(args.forward_thread) and args.sequence is not None


def _fills(before: list[Launch], run: list[Launch]) -> bool:
    """Return True if the run begins right after the one before it, and both are long."""
    shorter = min(before[-1].end - before[0].time, run[-1].end - run[0].time)
    return shorter > _RUN_US and 0 <= run[0].time - before[-1].end < _NEAR * shorter


_NEAR_US = 200.0
"""Arbitrary; a longer start or gap has another cause than the machine's latency."""
_IDLE_US = 2.0
"""Arbitrary; the largest accepted difference between the aligned clocks of host and device."""
_FEWEST = 3  # The fewest with a median that one outlier does not set.
_LAUNCH_US = (
    5.0  # Usual on data-center GPUs; used if not measured, as for `cost`, `back` and `least`.
)
_USUAL_US = {"gap": 1.5}


@dataclass(kw_only=True, slots=True)
class Latencies:
    """`launch`: from the call to the start on an idle stream. `gap`: between two activities of a stream.

    `cost`: host time of a launching call. `back`: from the end of the awaited work to the return of the wait.
    `least`: cost of a wait for work that is done already. All in microseconds: the first three by kind of
    activity, the others by kind of wait.
    """

    launch: dict[str, float]
    gap: dict[str, float]
    cost: dict[str, float]
    back: dict[str, float] = field(default_factory=dict)
    least: dict[str, float] = field(default_factory=dict)

    def of(self, figure: Literal["launch", "gap", "cost", "back", "least"], kind: str) -> float:
        """Return a figure of a kind, else that of all kinds, else a usual one."""
        known: dict[str, float] = getattr(self, figure)
        return known.get(kind, known.get("", _USUAL_US.get(figure, _LAUNCH_US)))


def measure(plan: Schedule) -> Latencies:
    """Measure the latencies of the machine on which the trace was recorded."""
    launch: dict[str, list[float]] = defaultdict(list)
    gap: dict[str, list[float]] = defaultdict(list)
    cost: dict[str, list[float]] = defaultdict(list)
    for work in plan.works:
        if (call := work.call) is None:
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


def _summary(
    samples: dict[str, list[float]], figure: Callable[[list[float]], float]
) -> dict[str, float]:
    by_kind = {kind: figure(values) for kind, values in samples.items() if len(values) >= _FEWEST}
    every = [value for values in samples.values() for value in values]
    return by_kind | ({"": figure(every)} if every else {})


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
    return _ProgramBuilder(trace, schedule(trace), sites).program()


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
        self.targets = targets(self.trace)
        self.ends = ends(self.plan)

    def program(self) -> ReplayProgram:
        """Return all steps, in order of time."""
        self._measure_returns()
        self.targets = targets(self.trace)
        handed = hand_overs(self.trace, self.plan)
        for launch in self.plan.launches:
            from_lane, delay = handed.get(id(launch), (None, 0.0))
            if from_lane is not None and launch.lane is not None:
                of, lane = self._lane(from_lane), self._lane(launch.lane)
                self.steps.append(ReplayStep(Does.HAND_OVER, lane, delay, 0.0, of=of))
            self.steps.append(self._step(launch, 0.0 if from_lane is not None else launch.gap))
            self.targets.note(launch)
        return ReplayProgram(
            steps=self.steps,
            lanes=len(self.lanes),
            streams=len(self.streams),
            activities=len(self.plan.works),
            tails=self._tails(),
            begin=self.trace.started(),
            end=self.trace.ended(),
        )

    def _measure_returns(self) -> None:
        """Measure the cost of a wait with nothing to await, and the delay of its return otherwise."""
        returns: dict[str, list[float]] = defaultdict(list)
        idle: dict[str, list[float]] = defaultdict(list)
        for launch in self.plan.launches:
            if launch.call is not None and is_waiting(launch) and not launch.works:
                last = max((w.event.end for w in self.targets.of(launch)), default=0.0)
                late = launch.call.end - last
                if last <= launch.call.ts:
                    idle[launch.kind].append(launch.call.dur)
                elif last > launch.call.ts + SKEW_US and late < _OUTSIDE_US:
                    returns[launch.kind].append(late)
            self.targets.note(launch)
        self.latencies.back = {kind: median(values) for kind, values in returns.items()}
        self.latencies.least = {
            kind: min(median_low(values), _OUTSIDE_US) for kind, values in idle.items()
        }

    def _step(self, launch: Launch, gap: float) -> ReplayStep:
        if launch.call is None or launch.lane is None:
            return ReplayStep(Does.OUTSIDE, 0, 0.0, 0.0, tuple(map(self._outside, launch.works)))
        lane = self._lane(launch.lane)
        if launch.works and (is_waiting(launch) or is_pageable(launch.works[0].event.name)):
            return self._copy(launch, lane, gap)
        return (self._wait if is_waiting(launch) else self._launch)(launch, lane, gap)

    def _launch(self, launch: Launch, lane: int, gap: float) -> ReplayStep:
        cost = launch.end - launch.time
        full = self._full_queue(launch, cost)
        activities = self._activities(launch)
        if full is None:
            return ReplayStep(Does.LAUNCH, lane, gap, cost, activities)
        usual = min(cost, self.latencies.of("cost", launch.works[0].kind))
        back = launch.end - full.event.end
        return ReplayStep(Does.WAIT, lane, gap, usual, activities, (full.number,), back)

    def _full_queue(self, launch: Launch, cost: float) -> DeviceWork | None:
        """Return the activity that had to end to make room for another launch, or None if there was room."""
        work = launch.works[0] if launch.works else None
        if work is None or cost < max(_LONG_US, _LONG * self.latencies.of("cost", work.kind)):
            return None
        done = bisect_right(self.ends.times, launch.time)
        ended = bisect_right(self.ends.times, launch.end + SKEW_US)
        if work.number - done < _QUEUE or not ended:
            return None
        last = self.ends.works[ended - 1]
        return last if last.number < work.number else None

    def _wait(self, launch: Launch, lane: int, gap: float) -> ReplayStep:
        cost = launch.end - launch.time
        awaited = self.targets.of(launch)
        last = max((work.event.end for work in awaited), default=0.0)
        back = self.latencies.of("back", launch.kind)
        least = min(cost, self.latencies.of("least", launch.kind))
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
        usual = min(
            cost, self.latencies.of("cost", work.kind), self.latencies.cost.get("kernel", cost)
        )
        activities = self._activities(launch, keeps=work.event.ts - launch.time)
        if work.event.ts > launch.end:
            return ReplayStep(Does.WAIT, lane, gap, cost, activities, site=site, without=usual)
        back, awaits = launch.end - work.event.end, (work.number,)
        return ReplayStep(
            Does.COPY, lane, gap, usual, activities, awaits, back, site=site, without=usual
        )

    def _activities(self, launch: Launch, keeps: float | None = None) -> tuple[Activity, ...]:
        if not launch.works:
            return ()
        first, *others = sorted(launch.works, key=lambda work: work.event.ts)
        begin = self._first(launch, first, keeps)
        nodes = (
            Activity(
                work.number,
                self._stream(work),
                work.event.dur,
                0.0,
                0.0,
                anchor=first.number,
                offset=work.event.ts - first.event.ts,
            )
            for work in others
        )
        return (begin, *nodes)

    def _first(self, launch: Launch, work: DeviceWork, keeps: float | None) -> Activity:
        event, before = work.event, work.before
        cost = launch.end - launch.time
        usual = self.latencies.of("cost", work.kind)
        late = cost - usual if cost > _LONG * usual and keeps is None else 0.0
        ready, gap = (self.latencies.of(one, work.kind) for one in ("launch", "gap"))
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

    def _tails(self) -> list[float]:
        """Return the time that each thread ran after its last step.

        Threads with operators but without steps count to the thread with the last step before them.
        """
        last = {one.lane: one.end for one in self.plan.launches if one.lane is not None}
        until = dict.fromkeys(self.lanes, 0.0)
        others = 0.0
        for events in (self.trace.operators, self.trace.annotations, self.trace.calls):
            for event in events:
                lane = lane_of(event)
                if lane in until:
                    until[lane] = max(until[lane], event.end)
                elif events is not self.trace.calls:
                    others = max(others, event.end)
        if until:
            latest = max(until, key=last.__getitem__)
            until[latest] = max(until[latest], others)
        return [max(0.0, end - last[lane]) for lane, end in until.items()]

    def _lane(self, lane: Lane) -> int:
        return self.lanes.setdefault(lane, len(self.lanes))

    def _stream(self, work: DeviceWork) -> int:
        return self.streams.setdefault(work.stream, len(self.streams))
