"""Runs a program again, with all its waits or without some.

In the manner of Zhu et al., "Daydream: Accurately Estimating the Efficacy of Optimizations for DNN
Training" (USENIX ATC 2020): what the host and each stream did one after the other stays in that order,
and every start follows from what it depends on, so that a wait that goes shifts all that came after it.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from torchtrim.costs.replay.one_stream import END, OneStream
from torchtrim.costs.replay.program import Activity, Does, ReplayProgram

_NEVER = float("-inf")
_NONE: frozenset[int] = frozenset()


class Replayed(NamedTuple):
    """How long the program took, in microseconds, and for each site how long the host was blocked."""

    span: float
    waited: dict[int, float]


def replay(
    program: ReplayProgram | OneStream,
    without: Set[int] = _NONE,
    *,
    host: float = 1.0,
    device: float = 1.0,
) -> Replayed:
    """Run the program without the waits of some sites.

    The copies and kernels of these sites stay; the host only goes on at once. `host` and `device` scale
    what each spends on its own: 0 for an infinitely fast one.
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
    for went, kept, both, site in zip(*program.stretches(host, device), strict=True):
        free += kept
        if now + both > free:
            free = now + both
        now += went
        if site == END or site in without:
            continue
        stands = free + back - now if free + back > now else 0.0
        now += stands
        if site >= 0:
            waited[site] = waited.get(site, 0.0) + stands
    return Replayed(max(now, free), waited)


class _Streams:
    """The streams of all devices: when each activity started and ended, and when each stream is free."""

    __slots__ = ("began", "device", "end", "start", "tail")

    def __init__(self, program: ReplayProgram, device: float) -> None:
        self.device = device
        self.tail = [0.0] * program.streams
        self.began = [0.0] * program.streams
        self.start = [0.0] * program.activities
        self.end = [0.0] * program.activities

    def give(self, activities: tuple[Activity, ...], now: float) -> None:
        """Run what a call launches that begins now."""
        device, tail, began, end = self.device, self.tail, self.began, self.end
        for (
            number,
            stream,
            seconds,
            ready,
            gap,
            after,
            extra,
            over,
            anchor,
            offset,
            floor,
        ) in activities:
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
            end[number] = at = at + seconds * device
            if at > tail[stream]:
                tail[stream] = at
