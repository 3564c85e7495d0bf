"""Runs a program again, with all its waits or without some.

In the manner of Zhu et al., "Daydream: Accurately Estimating the Efficacy of Optimizations for DNN
Training" (USENIX ATC 2020): what the host and each stream did one after the other stays in that order,
and every start follows from what it depends on, so that a wait that goes shifts all that came after it.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from torchtrim.sync.program import Does, Program

_NONE: frozenset[int] = frozenset()


class Replayed(NamedTuple):
    """How long the program took, in microseconds, and for each site how long the host stood there."""

    span: float
    waited: dict[int, float]


def replay(
    program: Program,
    without: Set[int] = _NONE,
    *,
    host: float = 1.0,
    device: float = 1.0,
) -> Replayed:
    """Run the program without the waits of some sites.

    The copies and kernels of these sites stay; the host only goes on at once. `host` and `device` scale
    what each spends on its own: 0 for an infinitely fast one.
    """
    clock = [0.0] * program.lanes
    tail = [0.0] * program.streams
    began = [0.0] * program.streams
    start = [0.0] * program.activities
    end = [0.0] * program.activities
    waited: dict[int, float] = {}
    for does, lane, gap, cost, launches, awaits, back, outside, site, shorter, of in program.steps:
        if does is Does.OUTSIDE:
            now = 0.0
        elif does is Does.HAND_OVER:
            now = clock[of] + gap * host
            if now > clock[lane]:
                clock[lane] = now
            continue
        else:
            now = clock[lane] + gap * host
        for (
            index,
            stream,
            seconds,
            ready,
            idle,
            after,
            extra,
            overlap,
            anchor,
            offset,
            floor,
        ) in launches:
            if anchor >= 0:
                at = start[anchor] + offset * device
            else:
                at = now + ready
                free = tail[stream] + idle if overlap is None else began[stream] + overlap * device
                if free > at:
                    at = free
                for other in after:
                    if end[other] > at:
                        at = end[other]
                at += extra * device
                if at < floor * device:
                    at = floor * device
            start[index] = began[stream] = at
            at += seconds * device
            end[index] = at
            if at > tail[stream]:
                tail[stream] = at
        if does is Does.LAUNCH:
            clock[lane] = now + cost * host
        elif does is not Does.OUTSIDE:
            if site in without:
                clock[lane] = now + shorter * host
                continue
            until = now + cost * host
            for other in awaits:
                if end[other] + back > until:
                    until = end[other] + back
            clock[lane] = until + outside * device
            if site >= 0:
                waited[site] = waited.get(site, 0.0) + clock[lane] - now
    last = max((c + t * host for c, t in zip(clock, program.tails, strict=True)), default=0.0)
    return Replayed(max(last, max(end, default=0.0)) - program.begin, waited)
