"""Cuts a chain into stages: exactly by the longest stage, then moved while a simulated step gets shorter."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise, product
from math import comb

from torchtrim.planner.stages.chain import Segment

Cuts = tuple[int, ...]
_MOST = 600  # Arbitrary; simulated steps for one candidate, about a second.


def balanced(segments: Sequence[Segment], stages: int, most_bytes: int | None = None) -> Cuts:
    """The cuts with the shortest longest stage, by dynamic programming: exact, in O(stages * segments^2).

    Among those the one whose first stages are short. `most_bytes`: what the parameters, gradients and
    optimizer state of a stage may take; it is not kept where nothing would. There are at least as many
    segments as stages.
    """
    assert 1 <= stages <= len(segments)
    seconds, states = [0.0], [0]
    for one in segments:
        seconds.append(seconds[-1] + one.seconds)
        states.append(states[-1] + one.state + one.gradients)

    def cost(first: int, last: int) -> float:
        over = most_bytes is not None and states[last] - states[first] > most_bytes
        return seconds[last] - seconds[first] + (seconds[-1] if over else 0.0)

    count = len(segments)
    best = [(cost(0, last), ()) for last in range(count + 1)]  # type: list[tuple[float, Cuts]]
    for stage in range(1, stages):
        best = [
            min(
                (
                    (max(best[first][0], cost(first, last)), (*best[first][1], first))
                    for first in range(stage, last)
                ),
                default=(float("inf"), ()),
            )
            for last in range(count + 1)
        ]
    return best[count][1]


def improved(cuts: Cuts, count: int, price: Callable[[Cuts], float]) -> tuple[Cuts, float]:
    """Move one cut, or two, while that lowers the price, from here and elsewhere; the best, and its price.

    Where there are few ways to cut, all of them are tried. What a step takes has many local optima where
    ranks have several stages, so the search begins anew at random cuts, always the same, while it may try
    more.
    """
    if comb(count - 1, len(cuts)) <= _MOST:
        best = min(every(count, len(cuts) + 1), key=price)
        return best, price(best)
    known: dict[Cuts, float] = {}
    drawn = random.Random(0)
    best = _descend(cuts, count, price, known)
    while len(known) < _MOST:
        start = tuple(sorted(drawn.sample(range(1, count), len(cuts))))
        best = min(best, _descend(start, count, price, known), key=lambda one: known[one])
    return best, known[best]


def _descend(
    cuts: Cuts, count: int, price: Callable[[Cuts], float], known: dict[Cuts, float]
) -> Cuts:
    """Move to the best neighbour while there is a better one."""
    known.setdefault(cuts, price(cuts))
    while True:
        around = dict.fromkeys(_neighbours(cuts, count))
        known.update((one, price(one)) for one in around if one not in known)
        best = min((*around, cuts), key=lambda one: known[one])
        if known[best] >= known[cuts]:
            return cuts
        cuts = best


def _neighbours(cuts: Cuts, count: int) -> Iterator[Cuts]:
    """One cut elsewhere between its neighbours, or two moved by a place: adjacent ones, or mirror images."""
    edges = (0, *cuts, count)
    for at, cut in enumerate(cuts):
        for place in range(edges[at] + 1, edges[at + 2]):
            if place != cut:
                yield (*cuts[:at], place, *cuts[at + 1 :])
        for other in {at + 1, len(cuts) - 1 - at} - {at}:
            if other < len(cuts):
                yield from _pairs(cuts, count, at, other)


def _pairs(cuts: Cuts, count: int, at: int, other: int) -> Iterator[Cuts]:
    for one, two in product((-1, 1), repeat=2):
        moved = list(cuts)
        moved[at] += one
        moved[other] += two
        if all(low < high for low, high in pairwise((0, *moved, count))):
            yield tuple(moved)


def every(count: int, stages: int) -> Iterator[Cuts]:
    """All ways to cut so many segments, for searches that leave nothing out."""
    yield from combinations(range(1, count), stages - 1)
