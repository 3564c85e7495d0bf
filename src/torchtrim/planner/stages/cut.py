"""Cuts a chain into stages: exactly by the longest stage, then moved while a simulated step gets shorter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations, pairwise

from torchtrim.planner.stages.chain import Segment

Cuts = tuple[int, ...]


def balanced(segments: Sequence[Segment], stages: int, most_bytes: int | None = None) -> Cuts:
    """The cuts with the shortest longest stage, by dynamic programming: exact, in O(stages * segments^2).

    Among those the one whose first stages are short. `most_bytes`: what the parameters, gradients and
    optimizer state of a stage may take; it is not kept where nothing would. There are at least as many
    segments as stages.
    """
    assert 1 <= stages <= len(segments)
    seconds = [0.0, *accumulate(one.seconds for one in segments)]
    states = [0, *accumulate(one.state + one.gradients for one in segments)]

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


def improved(
    cuts: Cuts, count: int, price: Callable[[Cuts], float], rounds: int = 20
) -> tuple[Cuts, float]:
    """Move one cut, or two, by a place while that lowers the price; the cuts, and their price."""
    known = {cuts: price(cuts)}
    for _ in range(rounds):
        around = [one for one in _neighbours(cuts, count) if one not in known]
        known.update((one, price(one)) for one in around)
        best = min((*around, cuts), key=lambda one: known[one])
        if known[best] >= known[cuts]:
            break
        cuts = best
    return cuts, known[cuts]


def _neighbours(cuts: Cuts, count: int) -> Iterator[Cuts]:
    """The same cuts with one moved, or two neighbours."""
    for width in (1, 2):
        for at in range(len(cuts) - width + 1):
            for step in (-1, 1):
                moved = tuple(
                    cut + step * (at <= number < at + width) for number, cut in enumerate(cuts)
                )
                edges = (0, *moved, count)
                if all(low < high for low, high in pairwise(edges)):
                    yield moved


def every(count: int, stages: int) -> Iterator[Cuts]:
    """All ways to cut so many segments, for searches that leave nothing out."""
    yield from combinations(range(1, count), stages - 1)
