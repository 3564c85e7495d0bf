"""A network as its planner sees it: operators, and the buffers that they read and make."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import NamedTuple

from torchtrim.memory.curve import bytes_over_time


class Node(NamedTuple):
    """One operator. Buffers are numbers into `Graph.sizes`; inputs and parameters are none.

    `needs`: nodes that must run before. `reads`: buffers it looks at. `makes`: buffers born here.
    `over`: buffers that it may overwrite with the first that it makes, if no one looks at them again.
    `writes`: it can write to a given place. `workspace`: bytes that it allocates besides, `own` those
    where it allocates its result itself.
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
    """Operators in the order in which they were written. `results`: buffers that outlive the call."""

    nodes: tuple[Node, ...]
    sizes: tuple[int, ...]
    results: frozenset[int] = frozenset()


class Lives(NamedTuple):
    """Buffer `b` is alive at positions `birth[b] <= i < death[b]` of an order; -1, 0 if it never is."""

    birth: tuple[int, ...]
    death: tuple[int, ...]


def lives_of(graph: Graph, order: Sequence[int]) -> Lives:
    """From the operator that makes a buffer to the last that looks at it; results to the end."""
    birth, death = [-1] * len(graph.sizes), [0] * len(graph.sizes)
    for position, number in enumerate(order):
        node = graph.nodes[number]
        for buffer in node.makes:
            birth[buffer] = position
        for buffer in (*node.makes, *node.reads):
            death[buffer] = position + 1
    for buffer in graph.results:
        death[buffer] = len(order)
    return Lives(tuple(birth), tuple(death))


def homes_of(graph: Graph, order: Sequence[int]) -> tuple[int, ...]:
    """For each buffer the one whose memory it takes over, itself where it takes over none.

    An operator overwrites a buffer of the same size which nothing reads after it.
    """
    lives = lives_of(graph, order)
    homes = list(range(len(graph.sizes)))
    for position, number in enumerate(order):
        node = graph.nodes[number]
        if not node.makes:
            continue
        made = node.makes[0]
        for old in node.over:
            ends = lives.death[old] == position + 1 and old not in graph.results
            if ends and graph.sizes[old] == graph.sizes[made]:
                homes[made] = homes[old]
                break
    return tuple(homes)


def bytes_alive(
    graph: Graph, order: Sequence[int], homes: Sequence[int], *, written: bool = False
) -> list[int]:
    """Bytes alive while each operator of the order runs, its own workspace included.

    `written`: operators write to given places, otherwise they allocate.
    """
    spans = home_lives(graph, lives_of(graph, order), homes).values()
    alive = bytes_over_time(len(order), ((size, first, last) for first, last, size in spans))
    nodes = (graph.nodes[number] for number in order)
    own = (node.workspace if written and node.writes else node.own for node in nodes)
    return list(map(add, alive, own))


def home_lives(graph: Graph, lives: Lives, homes: Sequence[int]) -> dict[int, tuple[int, int, int]]:
    """Of each home: from when until when it is alive, and its bytes."""
    spans: dict[int, tuple[int, int, int]] = {}
    for buffer, home in enumerate(homes):
        if lives.birth[buffer] < 0:
            continue
        first, last, _ = spans.get(home, (len(lives.birth) + lives.death[buffer], 0, 0))
        first, last = min(first, lives.birth[buffer]), max(last, lives.death[buffer])
        spans[home] = (first, last, graph.sizes[home])
    return spans
