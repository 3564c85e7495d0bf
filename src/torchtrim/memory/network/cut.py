"""Where to cut a network in two: before the cut it runs in parts of the batch, after it on all of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from torchtrim.memory.curve import bytes_over_time
from torchtrim.memory.network.graph import Graph, bytes_alive, home_lives, homes_of, lives_of

_AS_GOOD = 1.02  # Two per cent of the peak for fewer operators that run in parts. Arbitrary.


class Cut(NamedTuple):
    """The first `position` operators of an order run in parts. `carried`: bytes that go over the cut."""

    position: int
    peak: int
    carried: int


def best_cut(whole: Graph, part: Graph, order: Sequence[int], last: int) -> Cut:
    """The cut with the lowest peak, at `last` at most; of cuts as good the earliest.

    `whole` and `part` are the same network on the whole batch and on a part of it. Results carried over
    are live while the parts run, and after them until the end.
    """
    carried = _carried(whole, order)
    homes = homes_of(part, order)
    parts = [0, *accumulate(bytes_alive(part, order, homes), max)]
    rest = _rest(whole, order)
    cuts = [
        Cut(at, carried[at] + max(parts[at], rest[at]) if at else rest[0], carried[at])
        for at in range(last + 1)
    ]
    least = min(cut.peak for cut in cuts)
    return next(cut for cut in cuts if cut.peak <= _AS_GOOD * least)


def crossing(graph: Graph, order: Sequence[int], at: int) -> list[int]:
    """Buffers born before a position that are still looked at from there on, and results."""
    lives = lives_of(graph, order)
    return [
        buffer
        for buffer, (birth, death) in enumerate(zip(*lives, strict=True))
        if 0 <= birth < at and (death > at or buffer in graph.results)
    ]


def _carried(graph: Graph, order: Sequence[int]) -> list[int]:
    past = len(order) + 1
    return bytes_over_time(
        past,
        (
            (graph.sizes[buffer], birth + 1, past if buffer in graph.results else death)
            for buffer, (birth, death) in enumerate(zip(*lives_of(graph, order), strict=True))
            if birth >= 0
        ),
    )


def _rest(graph: Graph, order: Sequence[int]) -> list[int]:
    """For each cut, the most bytes alive at once of buffers born after it."""
    lives = lives_of(graph, order)
    born: list[list[tuple[int, int]]] = [[] for _ in order]
    for first, last, size in home_lives(graph, lives, homes_of(graph, order)).values():
        born[first].append((last, size))
    alive, rest, most = [0] * len(order), [0] * (len(order) + 1), 0
    for at in reversed(range(len(order))):
        alive[at] += graph.nodes[order[at]].own
        for last, size in born[at]:
            for position in range(at, last):
                alive[position] += size
                most = max(most, alive[position])
        rest[at] = most = max(most, alive[at])
    return rest
