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
    """Return the time that any stream of any device ran a kernel, a copy or a fill."""
    return covered(trace.activities)


def loading(trace: Trace) -> float:
    """Return the time that the program spent in its data loader's `next`."""
    marks = (*trace.annotations, *trace.operators)
    return covered(mark for mark in marks if mark.name.startswith(_LOADER))


_KERNEL = re.compile(r"[nr]ccl(?:Dev)?Kernel_([A-Za-z]+)")
_STEP = "ProfilerStep#"
_POINT_TO_POINT = ("send", "recv", "sendrecv")
_SMALL = 0.01  # Arbitrary; below a hundredth of the step, a delay is noise.
Key = tuple[str, str]


class CollectivePart(NamedTuple):
    """One rank's part in a collective, in microseconds of that rank's own clock."""

    name: str
    begin: float
    end: float


class Talk(NamedTuple):
    """A rank's collectives by group and step, in order. `exposed`: their time without other work on the
    device."""

    rank: int | None
    span: float
    busy: float
    exposed: float
    parts: dict[Key, tuple[CollectivePart, ...]]


_Matched = dict[int, CollectivePart]
"""A collective on each of its ranks, by number of the trace."""


def talk_of(trace: Trace) -> Talk:
    """Return the collectives of one rank's trace."""
    kernels = [activity for activity in trace.activities if _KERNEL.match(activity.name)]
    others = (activity for activity in trace.activities if not _KERNEL.match(activity.name))
    parts: defaultdict[Key, list[CollectivePart]] = defaultdict(list)
    step_of = _Steps(trace)
    for kernel in sorted(kernels, key=lambda kernel: kernel.ts):
        name, group = _named(kernel)
        if name not in _POINT_TO_POINT:
            begin = trace.base + kernel.ts
            parts[group, step_of(kernel)].append(CollectivePart(name, begin, begin + kernel.dur))
    return Talk(
        rank=trace.rank,
        span=trace.ended() - trace.started(),
        busy=covered(kernels),
        exposed=covered(trace.activities) - covered(others),
        parts={key: tuple(ordered) for key, ordered in parts.items()},
    )


def job_of(talks: Sequence[Talk]) -> TraceJob | None:
    """Describe the ranks' waits for each other, or return None if their traces share no collectives."""
    matched = [*_matched(talks)]
    if not matched:
        return None
    clocks = _clocks(len(talks), matched)
    waiting, caused, last = _waits(matched, clocks)
    ranks = tuple(
        TraceRank(
            rank=talk.rank if talk.rank is not None else number,
            clock_ms=in_ms(clocks[number]) if number in clocks else None,
            collectives=sum(map(len, talk.parts.values())),
            collectives_ms=in_ms(talk.busy),
            exposed_ms=in_ms(talk.exposed),
            waiting_ms=in_ms(waiting[number]),
            last=last[number],
            made_others_wait_ms=in_ms(caused[number]),
        )
        for number, talk in enumerate(talks)
    )
    worst = max(ranks, key=lambda rank: rank.made_others_wait_ms)
    negligible = _SMALL * in_ms(max(talk.span for talk in talks))
    return TraceJob(
        collectives=len(matched),
        unmatched=sum(rank.collectives for rank in ranks) - sum(map(len, matched)),
        ranks=tuple(sorted(ranks, key=lambda rank: rank.rank)),
        straggler=worst.rank if worst.made_others_wait_ms > negligible else None,
    )


def _matched(talks: Sequence[Talk]) -> Iterator[_Matched]:
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
            yield {number: part for (number, _), part in zip(members, together, strict=True)}


def _clocks(count: int, matched: Sequence[_Matched]) -> dict[int, float]:
    """Return each rank's clock minus the first one's, for ranks that share collectives with it."""
    ahead: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for parts in matched:
        first, *others = sorted(parts)
        for number in others:
            between = parts[number].end - parts[first].end
            ahead[first, number].append(between)
            ahead[number, first].append(-between)
    clocks = {0: 0.0}
    for _ in range(count):
        for (known, other), differences in ahead.items():
            if known in clocks and other not in clocks:
                clocks[other] = clocks[known] + median(differences)
    return clocks


def _waits(
    matched: Sequence[_Matched], clocks: dict[int, float]
) -> tuple[dict[int, float], dict[int, float], dict[int, int]]:
    """Return by rank its time waiting for the last one, the time others waited for it, and the number of
    collectives that it reached last."""
    waiting: defaultdict[int, float] = defaultdict(float)
    caused: defaultdict[int, float] = defaultdict(float)
    last: defaultdict[int, int] = defaultdict(int)
    for parts in matched:
        begins = {n: part.begin - clocks[n] for n, part in parts.items() if n in clocks}
        if len(begins) < 2:
            continue
        late = max(begins, key=begins.__getitem__)
        last[late] += 1
        for number, begin in begins.items():
            waited = min(begins[late] - begin, parts[number].end - parts[number].begin)
            waiting[number] += waited
            caused[late] += waited
    return waiting, caused, last


def _named(kernel: Event) -> tuple[str, str]:
    """Return a collective's name and group from the profiler, else from the kernel's name."""
    args = kernel.args
    match = _KERNEL.match(kernel.name)
    assert match is not None
    name = match[1] if args is None or args.collective is None else str(args.collective)
    return name.lower(), "" if args is None or args.group is None else str(args.group)


class _Steps:
    """The step of the program that launched each kernel; empty if unknown."""

    def __init__(self, trace: Trace) -> None:
        marks = (*trace.annotations, *trace.operators)
        steps = sorted((mark.ts, mark.name) for mark in marks if mark.name.startswith(_STEP))
        self._begins = [begin for begin, _ in steps]
        self._names = [name for _, name in steps]
        calls = ((call.args, call.ts) for call in trace.calls if steps)
        self._called = {args.correlation: ts for args, ts in calls if args and args.correlation}

    def __call__(self, kernel: Event) -> str:
        number = kernel.args.correlation if kernel.args else None
        begin = self._called.get(number) if number is not None else None
        if begin is None:
            return ""
        at = bisect_right(self._begins, begin) - 1
        return self._names[at] if at >= 0 else ""


def in_ms(microseconds: float) -> float:
    """Return milliseconds, to the microsecond."""
    return round(microseconds / 1e3, 3)
