"""Graphs that a program compiles, the order of their calls, and the code that Inductor writes."""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from torchtrim.compiled.code import note_sizes
from torchtrim.compiled.inductor import (
    Choose,
    NotPlanned,
    check,
    copy_of,
    dry,
    intercepted,
    written_inputs,
)
from torchtrim.compiled.joint import Joint, JointBuilder
from torchtrim.compiled.memory import Event, GraphCall, Pair, Simulated, in_order, memory_of
from torchtrim.compiled.names import Names, key_of, keys_of
from torchtrim.compiled.phases import on_backward
from torchtrim.compiled.sooner import can_free_sooner
from torchtrim.compiled.wrapper import Rises


class CompilableGraph:
    """A graph that a program compiled, of symbolic sizes as in its largest call seen."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any], options: Any) -> None:
        self._module = copy_of(module)
        self._inputs = [*map(_faked, module.graph.find_nodes(op="placeholder"), inputs)]
        self._options = options
        self._context = TracingContext.try_get()
        self._own: Pair | None = None
        self._pairs: dict[tuple[str, frozenset[int]], Pair] = {}
        self._joint: Joint | None = None
        self._edited: Joint | None = None
        self._can_free_sooner = False
        self._bytes = 0
        self.pair()

    @property
    def joint(self) -> Joint | None:
        """The graph's forward and backward, or None if it has no backward."""
        self.pair()
        return self._joint

    @property
    def edited(self) -> Joint | None:
        """The joint graph that frees memory sooner; as it is, if there is nothing to edit."""
        if self.joint is not None and self._can_free_sooner and self._edited is None:
            with contextlib.suppress(NotPlanned):
                self._edited = self._edit()
        return self._edited or self._joint

    def called(self, inputs: Sequence[Any]) -> None:
        """Note a call: if its inputs are larger than those before, the graph's sizes are theirs."""
        size = sum(one.nbytes for one in inputs if isinstance(one, torch.Tensor))
        if size > self._bytes:
            note_sizes(self._inputs, inputs)
            if self._bytes:
                self._own = self._edited = None
                self._pairs.clear()
            self._bytes = size

    def pair(self, choice: Mapping[str, frozenset[int]] = {}) -> Pair:
        """Return Inductor's code with a choice of what is saved, or with torch's own."""
        for joint in (self._joint, self._edited):
            if joint is not None and joint.key in choice:
                key = joint.key, choice[joint.key]
                if key not in self._pairs:
                    self._pairs[key] = self._code_saving(joint, choice[joint.key])
                return self._pairs[key]
        if self._own is None:
            self._own = self._code_own()
        return self._own

    def _code_own(self) -> Pair:
        def choose(graph: fx.Graph, info: Any, own: Callable[[], list[fx.Node]]) -> list[fx.Node]:
            chosen = own()
            self._joint = JointBuilder(graph, info, written_inputs(graph)).build(chosen)
            self._can_free_sooner = can_free_sooner(graph)
            return chosen

        return self.code(choose)

    def _edit(self) -> Joint:
        found: list[Joint] = []

        def choose(graph: fx.Graph, info: Any, own: Callable[[], list[fx.Node]]) -> list[fx.Node]:
            if self._joint is not None and key_of(keys_of(graph)) == self._joint.key:
                raise NotPlanned
            joint = JointBuilder(graph, info, written_inputs(graph)).build(own())
            found.append(joint)
            return nodes_to_save(keys_of(graph), info, {joint.values[at].key for at in joint.own})

        pair, joint = self.code(choose), found[0]
        self._pairs[joint.key, joint.own] = pair
        return joint

    def _code_saving(self, joint: Joint, saved: frozenset[int]) -> Pair:
        def choose(graph: fx.Graph, info: Any, _: Callable[[], list[fx.Node]]) -> list[fx.Node]:
            keys = keys_of(graph)
            if key_of(keys) != joint.key:
                raise NotPlanned
            return nodes_to_save(keys, info, {joint.values[at].key for at in saved})

        return self.code(choose)

    def code(self, choose: Choose) -> Pair:
        """Return Inductor's code with what `choose` saves."""
        with tracing(copy.copy(self._context)):
            return Pair.of(dry(self._module, self._inputs, choose, **self._options))


class Graphs:
    """The graphs of a program, and their calls in its last step."""

    def __init__(self) -> None:
        self.graphs: list[CompilableGraph] = []
        self._events: list[Event] = []
        self._calls: list[tuple[int, dict[int, tuple[int, int]]]] = []
        self._returned: weakref.WeakKeyDictionary[Any, tuple[int, int]] = (
            weakref.WeakKeyDictionary()
        )
        self.rises: Rises = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Have Inductor write code without compiling it; the program's graphs run eagerly meanwhile."""
        check()
        with intercepted(self._compile):
            yield

    def begin(self) -> None:
        """Begin a step: the calls from now on are its calls."""
        self._calls.clear()
        self._events = []

    def memory(
        self, choice: Mapping[str, frozenset[int]] = {}, above: Mapping[str, int] = {}
    ) -> Simulated:
        """Return the memory of the step's calls with a choice, or with torch's own.

        `above`: bytes to add in each phase, for what else is live.
        """
        return memory_of(self.calls(choice), self.rises, self._events, above)

    def calls(self, choice: Mapping[str, frozenset[int]] = {}) -> list[GraphCall]:
        """Return the step's calls with the code for a choice."""
        return [
            GraphCall(self.graphs[number].pair(choice), sources) for number, sources in self._calls
        ]

    @property
    def joints(self) -> list[Joint]:
        """The joint graph of each call that has a backward."""
        every = (self.graphs[number].joint for number, _ in self._calls)
        return [joint for joint in every if joint is not None]

    @property
    def edited(self) -> list[Joint]:
        """The joint graphs that free memory sooner, of the same calls."""
        every = (self.graphs[number].edited for number, _ in self._calls)
        return [joint for joint in every if joint is not None]

    @property
    def order(self) -> tuple[Event, ...]:
        """The step's events, with each call's number among `joints`."""
        trains = [at for at, (graph, _) in enumerate(self._calls) if self.graphs[graph].joint]
        return tuple(
            one._replace(call=trains.index(one.call))
            for one in in_order(len(self._calls), self._events)
            if one.call in trains
        )

    def _compile(
        self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any
    ) -> Callable[..., Any]:
        self.graphs.append(CompilableGraph(module, inputs, options))
        number = len(self.graphs) - 1
        assert (
            module.code
        )  # a lazy module builds its forward now, which would call itself the first time

        def run(*args: Any) -> Any:
            results = module.forward(*args)  # a call would be watched as one of a model
            self.graphs[number].called(args)
            self._note(number, args, results)
            return results

        return run

    def _note(self, number: int, args: Any, results: Any) -> None:
        sources = {
            at: self._returned[value.untyped_storage()]
            for at, value in enumerate(args)
            if isinstance(value, torch.Tensor) and value.untyped_storage() in self._returned
        }
        for at, value in enumerate(tree_leaves(results)):
            if isinstance(value, torch.Tensor):
                self._returned[value.untyped_storage()] = len(self._calls), at
        call = len(self._calls)
        self._events.append(Event(call))
        on_backward(results, functools.partial(_once, self._events, Event(call, True)))
        self._calls.append((number, sources))


def _once(events: list[Event], event: Event) -> None:
    if event not in events:
        events.append(event)


def _faked(node: fx.Node, value: Any) -> Any:
    """Return the fake tensor of an input: its sizes stay symbols, or numbers, in later compiles.

    A number of Python's is a tensor without dimensions here, whose value a compile may ask for.
    """
    has_value = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
    if has_value and not value.dim() and value.device.type == "cpu":
        return value
    return node.meta.get("example_value", value)


def nodes_to_save(names: Names, info: Any, keys: set[str]) -> list[fx.Node]:
    """Return the nodes of these keys, and the inputs, which cost nothing to keep."""
    return [*info.inputs, *(node for node, name in names.items() if name in keys)]
