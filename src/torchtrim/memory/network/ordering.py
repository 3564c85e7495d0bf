"""The order of operators with the lowest peak: as written, by a beam search, and branch by branch; the best
is kept. To find the very best order is NP-complete (Sethi, "Complete register allocation problems", 1975).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchtrim.memory.network.graph import Graph, bytes_alive, homes_of

Order = tuple[int, ...]
_WIDTH = 16  # Arbitrary; a wider beam takes longer in proportion.
_MOST_NODES = 3000
"""Arbitrary; sets of operators are bits of one number, so steps get slower with the size."""


def best_order(graph: Graph) -> Order:
    """Node numbers in the order with the lowest peak that was found, never worse than as written."""
    found: list[Order] = [tuple(range(len(graph.nodes))), _by_branches(graph)]
    if len(graph.nodes) <= _MOST_NODES:
        found.append(_Beam(graph).search())
    return min(found, key=lambda order: peak_of(graph, order))


def peak_of(graph: Graph, order: Sequence[int]) -> int:
    """The highest bytes alive, operators overwriting what no one looks at again."""
    return max(bytes_alive(graph, order, homes_of(graph, order)), default=0)


class _BeamState(NamedTuple):
    """Some of the operators have run. `done` and `ready` are sets of them as bits; `last` ran last."""

    peak: int
    live: int
    done: int
    ready: int
    last: int
    before: _BeamState | None


class _Beam:
    """Goes from operator to operator with the few best sets of those that have run."""

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

    def search(self) -> Order:
        """The order of the state that comes out best."""
        ready = sum(1 << n for n, needs in enumerate(self._needs) if not needs)
        states = [_BeamState(0, 0, 0, ready, -1, None)]
        for _ in self._graph.nodes:
            found: dict[int, _BeamState] = {}
            for state in states:
                for following in self._following(state):
                    known = found.get(following.done)
                    if known is None or following[:2] < known[:2]:
                        found[following.done] = following
            states = sorted(found.values(), key=lambda state: state[:3])[:_WIDTH]
        return tuple(_history(states[0]))

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
        """By how much memory rises while the operator runs, and how much of that stays."""
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


def _history(state: _BeamState) -> list[int]:
    order = []
    at: _BeamState | None = state
    while at is not None and at.last >= 0:
        order.append(at.last)
        at = at.before
    return order[::-1]


def _by_branches(graph: Graph) -> Order:
    """Depth first from the last nodes; of a node's needs the one with the highest peak first.

    For trees this is the best order if results are of one size (Liu, "On the storage requirement in
    the out-of-core multifrontal method", 1986).
    """
    weight = _peaks(graph)
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


def _peaks(graph: Graph) -> list[int]:
    """Of each node, the peak of its branch less what the branch leaves, as if no others ran."""
    weight: list[int] = []
    for node in graph.nodes:
        made = sum(graph.sizes[b] for b in node.makes)
        read = sum(graph.sizes[b] for b in node.reads)
        above = max((weight[n] for n in node.needs), default=0)
        weight.append(max(above, read + node.own))
        weight[-1] = max(weight[-1] - made, 0)
    return weight
