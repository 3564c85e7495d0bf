"""Memory planning for a network's graph: execution order, in-place reuse and buffer offsets.

Pure functions of a recorded graph. They need no torch. A buffer has an arena offset or its own allocation.
The order is the best of three: as written, by beam search, and branch by branch. Finding the optimal order is
NP-complete (Sethi, "Complete register allocation problems", 1975).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from torchtrim.memory.packing import Buffer, pack
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


_WIDTH = 16  # Arbitrary; a wider beam takes longer in proportion.
_MOST_NODES = 3000  # Arbitrary; operators are bits of one integer, so larger graphs take longer.


def best_order(graph: Graph) -> tuple[int, ...]:
    """Return the operator order with the lowest peak found, never worse than the order as written."""
    orders: list[tuple[int, ...]] = [tuple(range(len(graph.nodes))), _by_branches(graph)]
    if len(graph.nodes) <= _MOST_NODES:
        orders.append(_Beam(graph).search())
    return min(orders, key=lambda order: peak_of(graph, order))


def peak_of(graph: Graph, order: Sequence[int]) -> int:
    """Return the peak of an order with in-place reuse."""
    return max(bytes_alive(graph, order, homes_of(graph, order)), default=0)


class _BeamState(NamedTuple):
    """Partial order. `done` and `ready` are bit sets of operators; `last` ran last."""

    peak: int
    live: int
    done: int
    ready: int
    last: int
    before: _BeamState | None


class _Beam:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._needs = [sum(1 << n for n in set(node.needs)) for node in graph.nodes]
        self._users: list[list[int]] = [[] for _ in graph.nodes]
        self._readers = [0] * len(graph.sizes)
        for number, node in enumerate(graph.nodes):
            for need in set(node.needs):
                self._users[need].append(number)
            for buffer in set(node.reads):
                self._readers[buffer] |= 1 << number

    def search(self) -> tuple[int, ...]:
        ready = sum(1 << n for n, needs in enumerate(self._needs) if not needs)
        states = [_BeamState(0, 0, 0, ready, -1, None)]
        for _ in self._graph.nodes:
            best: dict[int, _BeamState] = {}
            for state in states:
                for following in self._following(state):
                    known = best.get(following.done)
                    if known is None or following[:2] < known[:2]:
                        best[following.done] = following
            states = sorted(best.values(), key=lambda state: state[:3])[:_WIDTH]
        order: list[int] = []
        last: _BeamState | None = states[0]
        while last is not None and last.last >= 0:
            order.append(last.last)
            last = last.before
        return tuple(order[::-1])

    def _following(self, state: _BeamState) -> Iterator[_BeamState]:
        for number in _bits(state.ready):
            done = state.done | 1 << number
            rises, stays = self._change(number, done)
            ready = state.ready & ~(1 << number)
            for user in self._users[number]:
                if self._needs[user] & done == self._needs[user]:
                    ready |= 1 << user
            peak = max(state.peak, state.live + rises)
            yield _BeamState(peak, state.live + stays, done, ready, number, state)

    def _change(self, number: int, done: int) -> tuple[int, int]:
        node, sizes = self._graph.nodes[number], self._graph.sizes
        dying = [b for b in set(node.reads) if self._ends(b, done)]
        made = sum(sizes[b] for b in node.makes)
        taken = sizes[node.makes[0]] if node.makes else 0
        reused = taken if any(b in dying and sizes[b] == taken for b in node.over) else 0
        kept = sum(sizes[b] for b in node.makes if not self._ends(b, done))
        return made - reused + node.own, kept - sum(sizes[b] for b in dying)

    def _ends(self, buffer: int, done: int) -> bool:
        return buffer not in self._graph.results and not self._readers[buffer] & ~done


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def _by_branches(graph: Graph) -> tuple[int, ...]:
    """Order operators depth first from the last nodes, entering the branch with the highest peak first.

    For trees this is optimal if all results have the same size (Liu, "On the storage requirement in the
    out-of-core multifrontal method", 1986).
    """
    # The peak of each node's branch, run alone, minus what the branch leaves.
    weight: list[int] = []
    for node in graph.nodes:
        made = sum(graph.sizes[b] for b in node.makes)
        read = sum(graph.sizes[b] for b in node.reads)
        above = max((weight[n] for n in node.needs), default=0)
        weight.append(max(above - made, read + node.own - made, 0))
    order: list[int] = []
    done = [False] * len(graph.nodes)
    for last in range(len(graph.nodes)):
        stack = [last]
        while stack:
            number = stack[-1]
            if done[number]:
                stack.pop()
                continue
            open_needs = [n for n in set(graph.nodes[number].needs) if not done[n]]
            if open_needs:
                stack.append(max(open_needs, key=lambda n: (weight[n], -n)))
            else:
                done[number] = True
                order.append(number)
                stack.pop()
    return tuple(order)


ALIGNMENT = 64  # Of PyTorch's CPU allocator (c10/core/alignment.h), a cache line.
WORTH_AN_ARENA = 1.02  # An arena, a single allocation per call, may cost up to 2 % more bytes.


class Layout(NamedTuple):
    """A memory plan. `homes[b]`: the buffer whose memory buffer `b` reuses, or itself.

    `offsets`: arena offsets of homes; other homes have their own allocation. `height`: arena size in bytes.
    `peak`: most bytes at any moment, with arena, other allocations and workspace; `outputs`: the same without
    workspace. `bound`: most bytes live at once in this order. `room`: for each operator, by its index, the
    bytes it may allocate without raising the peak.
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
    """Return the plan with the lowest peak. An arena is used if it costs at most 2 % more.

    `in_place`: let operators overwrite inputs that are not read later.
    """
    order = best_order(graph)
    homes = homes_of(graph, order) if in_place else tuple(range(len(graph.sizes)))
    apart = _layout(graph, order, homes, frozenset())
    if not arena:
        return apart
    together = _layout(graph, order, homes, _writable(graph, homes))
    return together if together.peak <= WORTH_AN_ARENA * apart.peak else apart


def _writable(graph: Graph, homes: Sequence[int]) -> frozenset[int]:
    """Return the homes that an operator can write to directly, except those that outlive the call."""
    outlive = {homes[buffer] for buffer in graph.results}
    outputs = (node.makes[0] for node in graph.nodes if node.writes and node.makes)
    written = (buffer for buffer in outputs if homes[buffer] == buffer and graph.sizes[buffer])
    return frozenset(written) - outlive


def _layout(
    graph: Graph, order: tuple[int, ...], homes: tuple[int, ...], inside: frozenset[int]
) -> Layout:
    spans = home_lives(graph, order, homes)
    packing = pack(
        [Buffer(home, *spans[home]) for home in sorted(inside)], alignment=ALIGNMENT, seconds=0
    )
    outside = (
        (size, first, end) for home, (first, end, size) in spans.items() if home not in inside
    )
    alive = bytes_over_time(len(order), outside)
    most = 0
    for number, now in zip(order, alive, strict=True):
        node = graph.nodes[number]
        written = bool(node.makes) and homes[node.makes[0]] in inside
        most = max(most, now + (node.workspace if written else node.own))
    room = {number: most - now for number, now in zip(order, alive, strict=True)}
    bare = graph._replace(nodes=tuple(node._replace(own=0, workspace=0) for node in graph.nodes))
    return Layout(
        order=order,
        homes=homes,
        offsets={int(home): offset for home, offset in packing.offsets.items()},
        height=packing.height,
        peak=packing.height + most,
        outputs=packing.height + max(alive, default=0),
        bound=max(bytes_alive(bare, order, homes), default=0),
        room=tuple(room[number] for number in range(len(order))),
    )
