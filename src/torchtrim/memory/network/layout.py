"""Where every buffer is: in one arena at an offset, or in memory of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torchtrim.memory.curve import bytes_over_time
from torchtrim.memory.network.graph import Graph, bytes_alive, home_lives, homes_of, lives_of
from torchtrim.memory.network.ordering import best_order
from torchtrim.memory.packing import Buffer, pack

ALIGNMENT = 64  # What PyTorch's CPU allocator aligns to (c10/core/alignment.h), a cache line.
WORTH_AN_ARENA = 1.02
"""An arena is one allocation a call; a fiftieth more bytes is what that may cost."""


class Layout(NamedTuple):
    """A plan. `homes[b]`: the buffer whose memory buffer `b` takes over, itself for its own.

    `offsets`: where homes lie in the arena of `height` bytes; others have memory of their own.
    `peak`: the most bytes at any moment, arena, own memory and workspace together; `outputs` without the
    workspace. `bound`: the most bytes that are alive at once in this order. `room`: for each operator, by its
    number, the bytes that it may allocate besides without raising the peak.
    """

    order: tuple[int, ...]
    homes: tuple[int, ...]
    offsets: dict[int, int]
    height: int
    peak: int
    outputs: int
    bound: int
    room: tuple[int, ...]


def lay_out(graph: Graph, *, in_place: bool = True, arena: bool = True) -> Layout:
    """The plan with the lowest peak; with an arena where that costs at most a fiftieth more.

    `in_place`: operators may overwrite what no one looks at again.
    """
    order = best_order(graph)
    homes = homes_of(graph, order) if in_place else tuple(range(len(graph.sizes)))
    apart = _layout(graph, order, homes, frozenset())
    if not arena:
        return apart
    together = _layout(graph, order, homes, _writable(graph, order, homes))
    return together if together.peak <= WORTH_AN_ARENA * apart.peak else apart


def _writable(graph: Graph, order: Sequence[int], homes: Sequence[int]) -> frozenset[int]:
    """Homes that an operator can be told to write to; what outlives the call is not among them."""
    outlive = {homes[buffer] for buffer in graph.results}
    found = set()
    for number in order:
        node = graph.nodes[number]
        for place, buffer in enumerate(node.makes):
            if homes[buffer] == buffer and place == 0 and node.writes and graph.sizes[buffer]:
                found.add(buffer)
    return frozenset(found - outlive)


def _layout(
    graph: Graph, order: tuple[int, ...], homes: tuple[int, ...], inside: frozenset[int]
) -> Layout:
    spans = home_lives(graph, lives_of(graph, order), homes)
    packing = pack(
        [Buffer(home, *spans[home]) for home in sorted(inside)], alignment=ALIGNMENT, seconds=0
    )
    alive = _apart(graph, order, spans, inside)
    needed = [
        now + _workspace(graph, number, homes, inside)
        for number, now in zip(order, alive, strict=True)
    ]
    most = max(needed, default=0)
    room = {number: most - now for number, now in zip(order, alive, strict=True)}
    return Layout(
        order=order,
        homes=homes,
        offsets={int(home): offset for home, offset in packing.offsets.items()},
        height=packing.height,
        peak=packing.height + most,
        outputs=packing.height + max(alive, default=0),
        bound=_bound(graph, order, homes),
        room=tuple(room[number] for number in range(len(order))),
    )


def _apart(
    graph: Graph,
    order: Sequence[int],
    spans: dict[int, tuple[int, int, int]],
    inside: frozenset[int],
) -> list[int]:
    """Bytes outside of the arena while each operator runs."""
    outside = ((size, a, b) for home, (a, b, size) in spans.items() if home not in inside)
    return bytes_over_time(len(order), outside)


def _workspace(graph: Graph, number: int, homes: Sequence[int], inside: frozenset[int]) -> int:
    """What an operator allocates besides: less where its result has its place."""
    node = graph.nodes[number]
    given = bool(node.makes) and homes[node.makes[0]] in inside
    return node.workspace if given else node.own


def _bound(graph: Graph, order: Sequence[int], homes: Sequence[int]) -> int:
    """The most bytes of buffers alive at once."""
    bare = graph._replace(nodes=tuple(node._replace(own=0, workspace=0) for node in graph.nodes))
    return max(bytes_alive(bare, order, homes), default=0)
