"""Where one host thread is blocked by another: the forward thread for the backward thread, and back."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from torchtrim.records.trace_events import Event, Lane, Trace
from torchtrim.traces.launches import Launch, Schedule
from torchtrim.traces.stacks import lane_of

_ENGINE = "autograd::engine::evaluate_function"
_RUN_US = 200.0
_NEAR = 0.2
_MOST_ENGINES = 64


def hand_overs(trace: Trace, plan: Schedule) -> dict[int, tuple[Lane, float]]:
    """By `id` of a launch: the thread that its own had waited for, and how long after it began.

    A thread of the autograd engine begins when another calls `backward()`, which is then blocked until
    the engine is done. Other threads count as taking turns where one's burst of calls fills the
    gap in the other's.
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
    """Threads of the autograd engine, each with the thread that calls it."""
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
    """Threads on which the profiler's steps are marked: never the engine's."""
    marks = (*trace.annotations, *(op for op in trace.operators if op.name.startswith("Profiler")))
    return {lane_of(mark) for mark in marks if mark.name.startswith("ProfilerStep")}


def _others(plan: Schedule, owners: dict[Lane, Lane]) -> list[tuple[Lane, Lane]]:
    calls = Counter(launch.lane for launch in plan.launches if launch.lane is not None)
    lanes = [lane for lane, count in calls.most_common(4) if lane not in owners and count > 8]
    return [(a, b) for i, a in enumerate(lanes) for b in lanes[i + 1 :] if a[0] == b[0]]


def _switches(launches: list[Launch]) -> list[tuple[list[Launch], list[Launch]]]:
    """Runs of launches of one thread, each with the run of the other thread before it."""
    runs: list[list[Launch]] = []
    for launch in launches:
        if runs and runs[-1][-1].lane == launch.lane:
            runs[-1].append(launch)
        else:
            runs.append([launch])
    return list(pairwise(runs))


def _fills(before: list[Launch], run: list[Launch]) -> bool:
    """Whether the run begins right after the one before it, and both are long."""
    lengths = [one[-1].end - one[0].time for one in (before, run)]
    between = run[0].time - before[-1].end
    return min(lengths) > _RUN_US and 0 <= between < _NEAR * min(lengths)
