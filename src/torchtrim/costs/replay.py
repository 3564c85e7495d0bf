"""A traced step as a program, and its replay with all syncs or without some.

Replays follow Zhu et al., "Daydream: Accurately Estimating the Efficacy of Optimizations for DNN Training"
(USENIX ATC 2020): the work of the host and of each stream keeps its order, and every start follows from its
dependencies, so that removing a sync shifts everything after it. With one thread and one stream, the work
between two syncs is one step of max-plus algebra (Baccelli, Cohen, Olsder and Quadrat, "Synchronization and
Linearity", Wiley 1992), so a replay takes as many steps as there are syncs, however many operators.

Times are microseconds from the start of the trace. Durations and the host's time between calls are as
recorded; `replay` computes when activities start and when waiting calls return.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

from torchtrim.records.trace import Bound

NO_SITE = -1


class Does(IntEnum):
    """The kind of a step."""

    LAUNCH = 0
    WAIT = 1
    COPY = 2
    OUTSIDE = 3
    HAND_OVER = 4


class Activity(NamedTuple):
    """Work on a stream. It starts `ready` after its launch began, and `gap` after its stream is free.

    `after`: activities of other streams that end before it starts. `extra`: an unexplained delay. `overlap`:
    its start after that of its predecessor on the stream, if the two overlapped. A node of a graph starts
    `offset` after activity `anchor`. `floor`: the earliest time, after work from before the trace.
    """

    number: int
    stream: int
    seconds: float
    ready: float
    gap: float
    after: tuple[int, ...] = ()
    extra: float = 0.0
    overlap: float | None = None
    anchor: int = -1
    offset: float = 0.0
    floor: float = 0.0


class ReplayStep(NamedTuple):
    """A step of host thread `lane`: it begins `gap` after the thread's previous step and takes `cost`.

    A wait returns `back` after all of `awaits` have ended; `outside`: delay by causes outside the trace.
    `without`: the cost of the call at `site` without the wait. A hand-over resumes `gap` after thread `of`.
    """

    does: Does
    lane: int
    gap: float
    cost: float
    launches: tuple[Activity, ...] = ()
    awaits: tuple[int, ...] = ()
    back: float = 0.0
    outside: float = 0.0
    site: int = NO_SITE
    without: float = 0.0
    of: int = -1


@dataclass(kw_only=True)
class ReplayProgram:
    """Steps in order of their beginnings. `tails`: how long each thread continued after its last step."""

    steps: list[ReplayStep] = field(default_factory=list)
    lanes: int = 0
    streams: int = 0
    activities: int = 0
    tails: list[float] = field(default_factory=list)
    begin: float = 0.0
    end: float = 0.0

    @property
    def span(self) -> float:
        """The recorded length of the trace, in microseconds."""
        return self.end - self.begin


END = -2  # The site of the last interval, which ends without a sync.


class Stretches(NamedTuple):
    """The work up to each sync and up to the end, as columns.

    The host advances by `host`. The stream is free `device` after it was, or `both` after the host began,
    whichever is later. Then the host synchronizes at `site`.
    """

    host: array[float]
    device: array[float]
    both: array[float]
    site: array[int]


class Moments(NamedTuple):
    """Times in microseconds from the start: of each operator on the host and on the stream, and of syncs.

    `device` is NaN for an operator that launches nothing.
    """

    host: array[float]
    device: array[float]
    waits: array[float]
    until: array[float]


@dataclass(frozen=True, kw_only=True)
class OneStream:
    """Time that the host and the device spend on each operator, in microseconds, and the host's syncs.

    An operator with `device` 0 launches nothing. A launch takes `launch` to arrive, the stream `gap` from
    one kernel to the next, a sync `back` to return. The host synchronizes after the operators `after`, in
    ascending order, at `sites`.
    """

    host: Sequence[float]
    device: Sequence[float]
    launch: float
    gap: float
    back: float
    after: Sequence[int]
    sites: Sequence[int]

    @cached_property
    def steps(self) -> array[int]:
        """The sites of the intervals; a replay takes one step for each."""
        return self.recorded.site

    @cached_property
    def recorded(self) -> Stretches:
        """The intervals, in recorded times."""
        return self.stretches(1.0, 1.0)

    def stretches(self, host: float, device: float) -> Stretches:
        """Return the intervals, with the times of the host and the device scaled."""
        columns = Stretches(array("d"), array("d"), array("d"), array("q"))
        first = 0
        for after, site in zip((*self.after, len(self.host) - 1), (*self.sites, END), strict=True):
            part = slice(first, after + 1)
            went, kept, both = 0.0, 0.0, _NEVER
            for own, work in zip(self.host[part], self.device[part], strict=True):
                if work:
                    adds = self.gap + work * device
                    kept += adds
                    both = max(both + adds, went + self.launch + work * device)
                went += own * host
            for column, value in zip(columns[:3], (went, kept, both), strict=True):
                column.append(value)
            columns.site.append(site)
            first = after + 1
        return columns

    def moments(self) -> Moments:
        """Compute when everything happens."""
        times = Moments(array("d"), array("d"), array("d"), array("d"))
        now, free, at = 0.0, _NEVER, 0
        for number, (own, work) in enumerate(zip(self.host, self.device, strict=True)):
            start = max(now + self.launch, free + self.gap) if work else float("nan")
            times.host.append(now)
            times.device.append(start)
            free = start + work if work else free
            now += own
            while at < len(self.after) and self.after[at] == number:
                times.waits.append(now)
                now = max(now, free + self.back)
                times.until.append(now)
                at += 1
        return times


_NEVER = float("-inf")
_NONE: frozenset[int] = frozenset()


class Replayed(NamedTuple):
    """The duration of the program, in microseconds, and how long each site blocked the host."""

    span: float
    waited: dict[int, float]


def replay(
    program: ReplayProgram | OneStream,
    without: Set[int] = _NONE,
    *,
    host: float = 1.0,
    device: float = 1.0,
) -> Replayed:
    """Run the program without the syncs of some sites.

    The copies and kernels of these sites stay; only the host does not wait. `host` and `device` scale the
    own time of each: 0 for an infinitely fast one.
    """
    if isinstance(program, OneStream):
        return _one_stream(program, without, host, device)
    clock = [0.0] * program.lanes
    streams = _Streams(program, device)
    give = streams.give
    waited: dict[int, float] = {}
    for does, lane, gap, cost, launches, awaits, back, outside, site, shorter, of in program.steps:
        if does is Does.HAND_OVER:
            clock[lane] = max(clock[lane], clock[of] + gap * host)
            continue
        now = clock[lane] + gap * host if does is not Does.OUTSIDE else 0.0
        if launches:
            give(launches, now)
        if does is Does.LAUNCH:
            clock[lane] = now + cost * host
        elif site in without:
            clock[lane] = now + shorter * host
        elif does is not Does.OUTSIDE:
            until = now + cost * host
            for other in awaits:
                until = max(until, streams.end[other] + back)
            clock[lane] = until + outside * device
            if site >= 0:
                waited[site] = waited.get(site, 0.0) + clock[lane] - now
    last = max((c + t * host for c, t in zip(clock, program.tails, strict=True)), default=0.0)
    return Replayed(max(last, max(streams.end, default=0.0)) - program.begin, waited)


def _one_stream(program: OneStream, without: Set[int], host: float, device: float) -> Replayed:
    back, now, free = program.back, 0.0, _NEVER
    waited: dict[int, float] = {}
    scaled = (host, device) != (1.0, 1.0)
    stretches = program.stretches(host, device) if scaled else program.recorded
    for went, kept, both, site in zip(*stretches, strict=True):
        free += kept
        if now + both > free:
            free = now + both
        now += went
        if site == END or site in without:
            continue
        wait = max(free + back - now, 0.0)
        now += wait
        if site >= 0:
            waited[site] = waited.get(site, 0.0) + wait
    return Replayed(max(now, free), waited)


class _Streams:
    """The streams of all devices: start and end of each activity, and when each stream is free."""

    __slots__ = ("began", "device", "end", "start", "tail")

    def __init__(self, program: ReplayProgram, device: float) -> None:
        self.device = device
        self.tail = [0.0] * program.streams
        self.began = [0.0] * program.streams
        self.start = [0.0] * program.activities
        self.end = [0.0] * program.activities

    def give(self, work: tuple[Activity, ...], now: float) -> None:
        device, tail, began, end = self.device, self.tail, self.began, self.end
        for number, stream, took, ready, gap, after, extra, over, anchor, offset, floor in work:
            if anchor >= 0:
                at = self.start[anchor] + offset * device
            else:
                at = now + ready
                free = tail[stream] + gap if over is None else began[stream] + over * device
                if free > at:
                    at = free
                for other in after:
                    if end[other] > at:
                        at = end[other]
                if extra or floor:
                    at = max(at + extra * device, floor * device)
            self.start[number] = began[stream] = at
            end[number] = at = at + took * device
            if at > tail[stream]:
                tail[stream] = at


_STEPS_A_REPORT = 600_000  # Arbitrary; bounds the replays of a report to seconds.
_FEWEST_REPLAYS = 16  # All pairs of five, the five alone, and all together.
_PAIRS = 5  # Ten pairs; grown sets cover what longer lists of pairs would.
_MOST_SETS = 5  # Arbitrary; as many rows as a report shows.
_NOTHING_US = 0.5  # Below what a profiler's clock resolves: rounding of sums, no gain.
_WORTH = 1.01  # A set that gains one per cent more than a smaller one adds no information.


@dataclass(kw_only=True)
class Prices:
    """Microseconds that the step gains: `alone` by site, `sets` with the largest gain first.

    `unpriced`: the number of sites not tried alone for lack of time.
    """

    base: Replayed
    alone: dict[int, float] = field(default_factory=dict)
    sets: list[tuple[frozenset[int], float]] = field(default_factory=list)
    together: float = 0.0
    unpriced: int = 0


def price(
    program: ReplayProgram | OneStream, sites: Sequence[int], *, apart: Sequence[int] = ()
) -> Prices:
    """Price the sites, sorted by falling wait, and those in `apart` only on their own.

    Sets are all pairs of the five longest waits, sets that grow by the site that then gains most, and all
    sites together. The length of the program bounds the number of replays.
    """
    base = replay(program)
    left = max(_FEWEST_REPLAYS, _STEPS_A_REPORT // max(1, len(program.steps)))
    known: dict[frozenset[int], float] = {frozenset(): 0.0}

    def saves(chosen: frozenset[int]) -> float:
        nonlocal left
        if chosen not in known:
            left -= 1
            gain = base.span - replay(program, chosen).span
            known[chosen] = gain if gain > _NOTHING_US else 0.0
        return known[chosen]

    together = saves(frozenset(sites)) if sites else 0.0
    alone = {}
    for site in (*sites, *apart):
        if left <= 0:
            break
        alone[site] = saves(frozenset((site,)))
    for pair in combinations(sites[:_PAIRS], 2):
        if left > 0:
            saves(frozenset(pair))
    grown: frozenset[int] = frozenset()
    candidates = list(alone.keys() & set(sites))
    while left > 0 and len(grown) < len(candidates) and saves(grown) * _WORTH < together:
        tried = {}
        for site in candidates:
            if site not in grown and left > 0:
                tried[site] = saves(grown | {site})
        if not tried:
            break
        grown |= {max(tried, key=lambda site: (tried[site], -site))}
    every = frozenset(sites)
    sets = {chosen: gain for chosen, gain in known.items() if chosen and chosen <= every}
    return Prices(
        base=base,
        alone=alone,
        sets=_ranked(sets),
        together=together,
        unpriced=len(sites) + len(apart) - len(alone),
    )


def _ranked(sets: dict[frozenset[int], float]) -> list[tuple[frozenset[int], float]]:
    """Return the best set of each size, largest gain first, except those with a subset that gains as much."""
    ranked: list[tuple[frozenset[int], float]] = []
    sizes: set[int] = set()
    for chosen, gain in sorted(sets.items(), key=lambda item: (-item[1], len(item[0]))):
        smaller = (g for other, g in sets.items() if other < chosen)
        if gain > 0 and len(chosen) not in sizes and all(gain > g * _WORTH for g in smaller):
            ranked.append((chosen, gain))
            sizes.add(len(chosen))
    return ranked[:_MOST_SETS]


_WAITS, _MOST, _LOADER = 0.10, 0.90, 0.25  # Shares of the span; see `bound`.


def bound(
    program: ReplayProgram | OneStream, *, gained: float, span: float, loading: float
) -> Bound:
    """Return the bound of the step. `gained`: the gain of removing all syncs, in microseconds.

    `waits` if that is a tenth of the span; `device` or `host` if either alone, with the other infinitely
    fast, takes nine tenths; `loader` if the device is not the bound and the data loader takes a quarter.
    """
    if span <= 0:
        return "unknown"
    host = replay(program, device=0.0).span / span
    device = replay(program, host=0.0).span / span
    if loading > _LOADER * span and host >= device:
        return "loader"
    if gained >= _WAITS * span:
        return "waits"
    if max(host, device) < _MOST:
        return "mixed"
    return "device" if device >= host else "host"
