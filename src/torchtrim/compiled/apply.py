"""Plans of compiled graphs in a running program: what each graph saves, by the graph's content."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from torch import fx

from torchtrim.compiled.graphs import nodes_to_save
from torchtrim.compiled.inductor import NotPlanned, Partitioner, check, partitioned
from torchtrim.compiled.names import (
    Names,
    double_key_of,
    double_keys_of,
    is_double,
    key_of,
    keys_of,
)
from torchtrim.records.plan import CompiledGraph


class Applied:
    """A plan in use. `planned`: graphs that save what it says; `others`: graphs that it does not know.

    `failures`: errors, after which torch partitioned a graph as it does by itself.
    """

    def __init__(self, plan: Sequence[CompiledGraph]) -> None:
        self.planned: set[str] = set()
        self.others: set[str] = set()
        self.failures: list[str] = []
        self._plan = {one.graph: one for one in plan}
        self._double = {one.double: one for one in plan if one.double}
        self._key = msgspec.json.encode(plan).hex()

    @property
    def unused(self) -> set[str]:
        """The plan's graphs that the program has not compiled."""
        return {*self._plan} - self.planned

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Have Inductor partition by the plan. Cached code of the same plan calls nothing here."""
        check()
        with partitioned(Partitioner(self._choose, self._key, self._failed)):
            yield

    def _choose(
        self, graph: fx.Graph, info: Any, own: Callable[[], list[fx.Node]]
    ) -> list[fx.Node]:
        names, planned, saves = self._known(graph)
        missing = {*saves} - {*names.values()}
        if missing:
            raise ValueError(f"the graph {planned} has no tensors {', '.join(sorted(missing))}")
        self.planned.add(planned)
        return nodes_to_save(names, info, {*saves})

    def _known(self, graph: fx.Graph) -> tuple[Names, str, tuple[str, ...]]:
        """Return the names of a graph's nodes, the plan's name of the graph, and of its saved values."""
        names = keys_of(graph)
        key = key_of(names)
        if one := self._plan.get(key):
            return names, one.graph, one.saves
        names = double_keys_of(graph)
        if is_double(graph) and (one := self._double.get(double_key_of(names))):
            return names, one.graph, one.double_saves
        raise NotPlanned(key)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, NotPlanned):
            self.others.add(str(error))
        else:
            self.failures.append(f"{type(error).__name__}: {error}")
