"""Puts traces of several ranks on one clock: matches their collectives, finds late ranks and waits.

Each machine has its own clock. A collective ends on all ranks at nearly the same moment, so two clocks
differ by the median difference of those ends.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from torchtrim.records.trace import Event, Trace, TraceJob, TraceRank

_LOADER = ("enumerate(DataLoader)", "enumerate(IterableDataset)")


def covered(events: Iterable[Event]) -> float:
    """Return the time covered by at least one of the events."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted((event.ts, event.ts + event.dur) for event in events):
        if end > until:
            total += end - max(begin, until)
            until = end
    return total


def device_busy(trace: Trace) -> float:
    """Return the time in which any stream of any device ran a kernel, a copy or a fill."""
    return covered(trace.activities)


def loading(trace: Trace) -> float:
    """Return the time that the program spent in its data loader's `next`."""
    marked = [e for e in (*trace.annotations, *trace.operators) if e.name.startswith(_LOADER)]
    return covered(marked)


_KERNEL = re.compile(r"[nr]ccl(?:Dev)?Kernel_([A-Za-z]+)")
_STEP = "ProfilerStep#"
_POINT_TO_POINT = ("send", "recv", "sendrecv")
_SMALL = 0.01  # Arbitrary; a rank that costs the others less than a hundredth is no straggler.
Key = tuple[str, str]


class CollectivePart(NamedTuple):
    """One rank's part in a collective, in microseconds of that rank's own clock."""

    name: str
    begin: float
    end: float


class Talk(NamedTuple):
    """A rank's collectives by group and step, in order. `exposed`: the time in which nothing else ran on the
    device."""

    rank: int | None
    span: float
    busy: float
    exposed: float
    parts: dict[Key, tuple[CollectivePart, ...]]


class _Met(NamedTuple):
    """A collective on each of its ranks, by number of the trace."""

    parts: dict[int, CollectivePart]


def talk_of(trace: Trace) -> Talk:
    """Return the collectives of one rank's trace."""
    kernels = [one for one in trace.activities if _KERNEL.match(one.name)]
    others = [one for one in trace.activities if not _KERNEL.match(one.name)]
    parts: defaultdict[Key, list[CollectivePart]] = defaultdict(list)
    step_of = _Steps(trace)
    for kernel in sorted(kernels, key=lambda one: one.ts):
        name, group = _named(kernel)
        if name not in _POINT_TO_POINT:
            begin = trace.base + kernel.ts
            parts[group, step_of(kernel)].append(CollectivePart(name, begin, begin + kernel.dur))
    return Talk(
        rank=trace.rank,
        span=trace.ended() - trace.started(),
        busy=covered(kernels),
        exposed=covered(trace.activities) - covered(others),
        parts={key: tuple(found) for key, found in parts.items()},
    )


def job_of(talks: Sequence[Talk]) -> TraceJob | None:
    """Describe how the ranks waited for each other, or return None if their traces share no collectives."""
    met = [*_matched(talks)]
    if not met:
        return None
    clocks = _clocks(len(talks), met)
    waiting, made, last = _waits(met, clocks)
    ranks = tuple(
        TraceRank(
            rank=talk.rank if talk.rank is not None else number,
            clock_ms=_ms(clocks[number]) if number in clocks else None,
            collectives=sum(map(len, talk.parts.values())),
            collectives_ms=_ms(talk.busy),
            exposed_ms=_ms(talk.exposed),
            waiting_ms=_ms(waiting[number]),
            last=last[number],
            made_others_wait_ms=_ms(made[number]),
        )
        for number, talk in enumerate(talks)
    )
    return TraceJob(
        collectives=len(met),
        unmatched=sum(one.collectives for one in ranks) - sum(len(one.parts) for one in met),
        ranks=tuple(sorted(ranks, key=lambda one: one.rank)),
        straggler=_straggler(ranks, max(talk.span for talk in talks)),
    )


def _straggler(ranks: Iterable[TraceRank], span: float) -> int | None:
    """Return the rank that the others wait for longest, unless the wait is negligible."""
    worst = max(ranks, key=lambda one: one.made_others_wait_ms)
    return worst.rank if worst.made_others_wait_ms > _SMALL * _ms(span) else None


def _matched(talks: Sequence[Talk]) -> Iterator[_Met]:
    """Match the collectives of a group, which come in the same order on each rank, up to the first
    difference.

    A group in only one trace belongs to ranks whose traces are missing.
    """
    keys = dict.fromkeys(key for talk in talks for key in talk.parts)
    for key in keys:
        members = [(n, talk.parts[key]) for n, talk in enumerate(talks) if key in talk.parts]
        if len(members) < 2:
            continue
        for together in zip(*(parts for _, parts in members), strict=False):
            if len({part.name for part in together}) > 1:
                break
            numbers = (number for number, _ in members)
            yield _Met(dict(zip(numbers, together, strict=True)))


def _clocks(count: int, met: Sequence[_Met]) -> dict[int, float]:
    """Return how far each rank's clock is ahead of the first one's, for ranks that share collectives with
    it."""
    ahead: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for one in met:
        numbers = sorted(one.parts)
        for number in numbers[1:]:
            between = one.parts[number].end - one.parts[numbers[0]].end
            ahead[numbers[0], number].append(between)
            ahead[number, numbers[0]].append(-between)
    clocks = {0: 0.0}
    for _ in range(count):
        for (known, other), found in ahead.items():
            if known in clocks and other not in clocks:
                clocks[other] = clocks[known] + median(found)
    return clocks


def _waits(
    met: Sequence[_Met], clocks: dict[int, float]
) -> tuple[dict[int, float], dict[int, float], dict[int, int]]:
    """Return for each rank how long it waited for the last one, how long others waited for it, and how often
    it was last."""
    waiting: defaultdict[int, float] = defaultdict(float)
    made: defaultdict[int, float] = defaultdict(float)
    last: defaultdict[int, int] = defaultdict(int)
    for one in met:
        begins = {n: part.begin - clocks[n] for n, part in one.parts.items() if n in clocks}
        if len(begins) < 2:
            continue
        late = max(begins, key=begins.__getitem__)
        last[late] += 1
        for number, begin in begins.items():
            part = one.parts[number]
            waited = min(begins[late] - begin, part.end - part.begin)
            waiting[number] += waited
            made[late] += waited
    return waiting, made, last


def _named(kernel: Event) -> tuple[str, str]:
    """Return a collective's name and group from the profiler, else from the kernel's name."""
    args = kernel.args
    said = args.collective if args else None
    match = _KERNEL.match(kernel.name)
    assert match is not None
    name = str(said if said is not None else match[1]).lower()
    return name, "" if args is None or args.group is None else str(args.group)


class _Steps:
    """The step of the program that launched each kernel; empty if unknown."""

    def __init__(self, trace: Trace) -> None:
        marks = (*trace.annotations, *trace.operators)
        found = sorted((one.ts, one.name) for one in marks if one.name.startswith(_STEP))
        self._begins = [begin for begin, _ in found]
        self._names = [name for _, name in found]
        calls = trace.calls if found else ()
        self._called = {
            one.args.correlation: one.ts for one in calls if one.args and one.args.correlation
        }

    def __call__(self, kernel: Event) -> str:
        number = kernel.args.correlation if kernel.args else None
        begin = self._called.get(number) if number is not None else None
        if begin is None:
            return ""
        at = bisect_right(self._begins, begin) - 1
        return self._names[at] if at >= 0 else ""


def _ms(microseconds: float) -> float:
    return round(microseconds / 1e3, 3)
