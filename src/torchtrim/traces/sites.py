"""Waiting calls -> sites: the places in user code at which the host waits, each with its count."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from torchtrim.records.trace import Phase
from torchtrim.records.trace_events import Event, Trace
from torchtrim.traces.lines import Sources, called_by, hints_of
from torchtrim.traces.stacks import (
    CallMoment,
    Frame,
    frames_of,
    is_annotation,
    is_backward,
    lane_of,
    moments,
    parse_frame,
    place_of,
)
from torchtrim.traces.waiting import Wait, same_stand

_STEP = "ProfilerStep"
_MOST_FRAMES = 20_000  # Arbitrary; bounds the search for one line.
Key = tuple[str, str, int, str, str, bool]


@dataclass(kw_only=True, eq=False)
class Site:
    """A place, and the waiting calls that were made from there; `stands` counts a copy and its wait once."""

    frame: Frame | None
    op: str
    within: str
    phase: Phase
    is_device: bool
    calls: list[Event] = field(default_factory=list)
    stands: int = 0
    lines: set[int] = field(default_factory=set)

    @property
    def wait_ms(self) -> float:
        """How long the calls took, as recorded."""
        return sum(call.dur for call in self.calls) / 1e3


def sites_of(trace: Trace, waits: Sequence[Wait], sources: Sources | None) -> list[Site]:
    """The sites, the longest wait first; what the profiler did for itself is left out."""
    own = [wait for wait in waits if not wait.is_profiler]
    forward = _forward(trace, own)
    is_users = sources.has if sources is not None else _nobodys
    found: dict[Key, Site] = {}
    last: dict[tuple[str, str], Wait] = {}
    for wait in own:
        before = last.get(lane_of(wait.call))
        last[lane_of(wait.call)] = wait
        site = _site(wait, forward.get(id(wait)), found, is_users)
        site.calls.append(wait.call)
        site.stands += before is None or not same_stand(before, wait)
        if sources is not None and site.frame is not None and not site.frame.exact:
            site.lines.update(_lines(trace, wait, forward.get(id(wait)), site.frame, sources))
    return sorted(found.values(), key=lambda site: -site.wait_ms)


def _nobodys(path: str) -> bool:
    return False


def _site(
    wait: Wait,
    forward: CallMoment | None,
    found: dict[Key, Site],
    is_users: Callable[[str], bool],
) -> Site:
    frame = place_of(wait.frames, is_users)
    if frame is None and forward is not None:
        frame = place_of(frames_of(forward), is_users)
    innermost = wait.moment.innermost
    op = innermost.name if innermost is not None else wait.call.name
    within = _within(wait.moment)
    phase: Phase = "backward" if wait.moment.backward is not None else "forward"
    where = (frame.path, frame.function, frame.line) if frame else ("", "", 0)
    key = (*where, op, "" if frame else within, wait.is_device)
    if key not in found:
        found[key] = Site(frame=frame, op=op, within=within, phase=phase, is_device=wait.is_device)
    return found[key]


def _within(moment: CallMoment) -> str:
    """The innermost annotation, else the outermost operator."""
    marks = [op.name for op in moment.operators if not op.name.startswith(_STEP)]
    named = [op.name for op in moment.operators if is_annotation(op) and op.name in marks]
    return (named[-1:] or marks[:1] or [""])[0]


def _forward(trace: Trace, waits: list[Wait]) -> dict[int, CallMoment]:
    """For waits of the backward pass without frames of their own: the forward operator's moment."""
    asked = {
        id(wait): wait
        for wait in waits
        if wait.moment.backward is not None and place_of(wait.frames) is None
    }
    if not asked:
        return {}
    numbers = {_sequence(wait.moment.backward) for wait in asked.values()}
    made: dict[object, list[Event]] = defaultdict(list)
    for op in trace.operators:
        if op.args is not None and op.args.sequence in numbers and not is_backward(op):
            made[op.args.sequence].append(op)
    makers: dict[int, Event] = {}
    for key, wait in asked.items():
        earlier = [op for op in made[_sequence(wait.moment.backward)] if op.ts < wait.call.ts]
        elsewhere = [op for op in earlier if lane_of(op) != lane_of(wait.call)]
        if elsewhere or earlier:
            makers[key] = (elsewhere or earlier)[-1]
    around = moments(trace, makers.values())
    return dict(zip(makers, around, strict=True))


def _sequence(operator: Event | None) -> object:
    return operator.args.sequence if operator is not None and operator.args is not None else None


def _lines(
    trace: Trace, wait: Wait, forward: CallMoment | None, frame: Frame, sources: Sources
) -> list[int]:
    """The lines from which the wait may come; one where the source and the frames' order tell it."""
    moment = wait.moment if place_of(wait.frames) is not None else (forward or wait.moment)
    parsed = [parse_frame(one.name, exact=False) for one in moment.frames]
    at = max((i for i, one in enumerate(parsed) if one == frame), default=-1)
    child = moment.frames[at + 1] if 0 <= at < len(parsed) - 1 else None
    began = moment.frames[at].ts if at >= 0 else 0.0
    operators = tuple(
        op.name for op in moment.operators if op.ts >= began and not is_annotation(op)
    )
    hints = hints_of(child.name if child is not None else "", operators)
    lines = sources.lines(frame.path, frame.line, frame.function, hints)
    if len(lines) > 1 and child is not None:
        siblings = _siblings(trace, moment.frames[at], child)
        if len(siblings) == len(lines):
            return [lines[siblings.index(child.ts)]]
    return lines


def _siblings(trace: Trace, parent: Event, child: Event) -> list[float]:
    """When the parent frame made the calls that are called as the child is, itself among them."""
    lane, name, until = lane_of(parent), called_by(child.name), parent.ts
    found = []
    begin = bisect_right(trace.frames, parent.ts, key=lambda frame: frame.ts)
    for frame in islice(trace.frames, begin, begin + _MOST_FRAMES):
        if frame.ts > parent.end:
            break
        if frame.ts >= until and frame is not parent and lane_of(frame) == lane:
            until = frame.end
            if called_by(frame.name) == name:
                found.append(frame.ts)
    return found if child.ts in found else []
