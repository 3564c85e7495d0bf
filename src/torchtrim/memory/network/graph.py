"""Graph of a network for memory planning: operators, and the buffers they read and produce."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from torchtrim.memory.packing.buffers import bytes_over_time


class Node(NamedTuple):
    """One operator. Buffers are indices into `Graph.sizes`; inputs and parameters are not included.

    `needs`: nodes that must run first. `reads`: input buffers. `makes`: output buffers. `over`: buffers that
    the first output may overwrite if they are not read later. `writes`: True if the operator can write to a
    preallocated output. `workspace`: scratch bytes when it does, `own` when it allocates its output itself.
    """

    name: str
    needs: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    over: tuple[int, ...] = ()
    writes: bool = False
    workspace: int = 0
    own: int = 0


class Graph(NamedTuple):
    """Operators in program order. `results`: buffers that outlive the call."""

    nodes: tuple[Node, ...]
    sizes: tuple[int, ...]
    results: frozenset[int] = frozenset()


def lives_of(graph: Graph, order: Sequence[int]) -> list[tuple[int, int]]:
    """Return each buffer's birth and death: it is live at positions `birth <= i < death`.

    It lives from the operator that makes it to its last reader, a result to the end. (-1, 0): never live.
    """
    birth, death = [-1] * len(graph.sizes), [0] * len(graph.sizes)
    for position, number in enumerate(order):
        node = graph.nodes[number]
        for buffer in node.makes:
            birth[buffer] = position
        for buffer in (*node.makes, *node.reads):
            death[buffer] = position + 1
    for buffer in graph.results:
        death[buffer] = len(order)
    return list(zip(birth, death, strict=True))


def homes_of(graph: Graph, order: Sequence[int]) -> tuple[int, ...]:
    """Return, for each buffer, the buffer whose memory it reuses, or itself.

    An operator overwrites an input of the same size that is not read later.
    """
    lives = lives_of(graph, order)
    homes = list(range(len(graph.sizes)))
    for position, number in enumerate(order):
        node = graph.nodes[number]
        if not node.makes:
            continue
        made = node.makes[0]
        for old in node.over:
            ends = lives[old][1] == position + 1 and old not in graph.results
            if ends and graph.sizes[old] == graph.sizes[made]:
                homes[made] = homes[old]
                break
    return tuple(homes)


def bytes_alive(graph: Graph, order: Sequence[int], homes: Sequence[int]) -> list[int]:
    """Return the live bytes during each operator of the order, its workspace included."""
    spans = home_lives(graph, order, homes).values()
    alive = bytes_over_time(len(order), ((size, first, last) for first, last, size in spans))
    return [level + graph.nodes[n].own for level, n in zip(alive, order, strict=True)]


def home_lives(
    graph: Graph, order: Sequence[int], homes: Sequence[int]
) -> dict[int, tuple[int, int, int]]:
    """Return the first position, end position and bytes of each home."""
    spans: dict[int, tuple[int, int, int]] = {}
    for home, (birth, death) in zip(homes, lives_of(graph, order), strict=True):
        if birth >= 0:
            first, last, _ = spans.get(home, (birth, death, 0))
            spans[home] = min(first, birth), max(last, death), graph.sizes[home]
    return spans


_AS_GOOD = 1.02  # Arbitrary; 2 % of the peak are worth fewer operators that run in parts.


class Cut(NamedTuple):
    """A cut after the first `position` operators, which run in parts. `carried`: bytes that cross it."""

    position: int
    peak: int
    carried: int


def best_cut(whole: Graph, part: Graph, order: Sequence[int], last: int) -> Cut:
    """Return the cut with the lowest peak, at most at `last`. Ties go to the earliest.

    `whole` and `part` are the same network on the whole batch and on a part of it. Results that cross the cut
    are live while the parts run and until the end.
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


def _carried(graph: Graph, order: Sequence[int]) -> list[int]:
    past = len(order) + 1
    lives = (
        (graph.sizes[buffer], birth + 1, past if buffer in graph.results else death)
        for buffer, (birth, death) in enumerate(lives_of(graph, order))
        if birth >= 0
    )
    return bytes_over_time(past, lives)


def _rest(graph: Graph, order: Sequence[int]) -> list[int]:
    """Return, for each cut, the peak of buffers born after it."""
    born: list[list[tuple[int, int]]] = [[] for _ in order]
    for first, last, size in home_lives(graph, order, homes_of(graph, order)).values():
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
