"""A joint graph of forward and backward as data: what can be saved, or computed again."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from torchtrim.compiled.code import hint
from torchtrim.compiled.inductor import draws, operator_kinds
from torchtrim.compiled.names import double_key_of, double_keys_of, key_of, keys_of

FLOPS, BYTES = 4e10, 8e9
"""Of one core, a second. A plan depends on their ratio alone."""
_READS = 4
"""Inductor's `realize_reads_threshold`: with more, a result that has several readers is written to memory."""
_MUTATING = "copy_"
_TRANSCENDENTAL = {"exp", "tanh", "erf", "log", "sigmoid", "pow", "rsqrt", "sqrt", "sin", "cos"}
_DEAR = 6.0  # a transcendental function takes as long as reading and writing some more numbers


class Value(NamedTuple):
    """A value of forward that backward needs, directly or to compute others again.

    `parents`: the values it is computed from. `uses`: the positions in backward that read it. `stays`:
    computed again, it takes memory; else Inductor fuses it into what reads it. `double`: its key in float64.
    """

    key: str
    bytes: int
    seconds: float
    parents: tuple[int, ...]
    uses: tuple[int, ...]
    stays: bool
    can_save: bool
    can_redo: bool
    double: str = ""


Kernel = tuple[str, int]
"""A library's kernel in backward, and its position there."""


class Joint(NamedTuple):
    """A joint graph. `work`: seconds up to each position in backward; `gradients`: bytes alive there.

    `kernels`: backward's kernels of libraries. `own`: the values that torch saves by itself. `together`:
    values computed from inputs alone, and share one: computed again, Inductor may fuse them into
    one kernel, and then holds all that is between their reads. `double`: the graph's key in float64.
    """

    key: str
    values: tuple[Value, ...]
    work: tuple[float, ...]
    gradients: tuple[int, ...]
    own: frozenset[int]
    kernels: tuple[Kernel, ...] = ()
    together: frozenset[int] = frozenset()
    double: str = ""


class JointBuilder:
    """Builder of a `Joint` from a graph and torch's classification of its nodes.

    `written`: further inputs that the program, not the graph, writes to before backward.
    """

    def __init__(self, graph: fx.Graph, info: Any, written: Iterable[fx.Node] = ()) -> None:
        self._graph = graph
        self._info = info
        self._kinds = operator_kinds()
        self._keys, self._double = keys_of(graph), double_keys_of(graph)
        calls = [node for node in graph.nodes if node.op == "call_function"]
        self._backward = [node for node in calls if info.is_required_bw(node)]
        self._position = {node: at for at, node in enumerate(self._backward)}
        self._forward = {node for node in calls if node not in self._position}
        self._outputs = {self.root(each) for each in self._output_nodes()}
        self._mutated = {*written, *self._written()}
        self._written_out: set[fx.Node] = set()
        self._written_out = {*self._with_many_reads()}
        self._read: dict[fx.Node, frozenset[int]] = {}
        for node in reversed(calls):  # the last first: a chain of readers may be long
            self._reads(node)

    def build(self, own: Iterable[fx.Node]) -> Joint:
        """Return the graph as data. `own`: what torch saves."""
        needed = self._needed()
        nodes = [node for node in self._graph.nodes if node in needed]
        number = {node: at for at, node in enumerate(nodes)}
        values = tuple(self._value(node, number) for node in nodes)
        saved = frozenset(number[node] for each in own if (node := self.root(each)) in number)
        seconds, work = 0.0, []
        for node in self._backward:
            seconds += self.seconds(node)
            work.append(seconds)
        kernels = tuple(
            (str(getattr(node.target, "overloadpacket", node.target)).rpartition(".")[2], at)
            for at, node in enumerate(self._backward)
            if self._is_kernel(node)
        )
        met = {number[node] for node in self._together(nodes)}
        together = frozenset(at for at in met if values[at].can_save)
        return Joint(
            key=key_of(self._keys),
            values=values,
            work=tuple(work),
            gradients=self._gradients(),
            own=saved,
            kernels=kernels,
            together=together,
            double=double_key_of(self._double),
        )

    def root(self, node: fx.Node) -> fx.Node:
        """Return the node that a view is of."""
        while self.is_view(node) and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return node

    def is_view(self, node: fx.Node) -> bool:
        """Return True for operators that Inductor computes without memory."""
        if node.target is operator.getitem:  # of a split
            return isinstance(node.args[0], fx.Node) and self.is_view(node.args[0])
        return bool(self._kinds.is_view(node)) or node.target is torch.ops.aten.reshape.default

    def _fuses(self, node: fx.Node) -> bool:
        """Return True if Inductor computes a node within the loop of its neighbours."""
        return bool(self._kinds.is_fusible(node)) or "inductor_" in str(node.target)

    def bytes(self, node: fx.Node) -> int:
        """Return the bytes of a node's result."""
        value = node.meta.get("val")
        size = value.element_size() if isinstance(value, torch.Tensor) else 0
        return _count(node) * size

    def seconds(self, node: fx.Node) -> float:
        """Return about how long a node takes: its products, or its bytes."""
        if self.is_view(node) or node.target is operator.getitem:
            return 0.0
        moved = self.bytes(node) + sum(map(self.bytes, node.all_input_nodes))
        if self._fuses(node):
            name = getattr(node.target, "overloadpacket", node.target)
            dear = getattr(name, "__name__", "") in _TRANSCENDENTAL
            return self.bytes(node) / BYTES * (_DEAR if dear else 1.0) / 4
        return _flops(node) / FLOPS + moved / BYTES

    def _output_nodes(self) -> list[fx.Node]:
        output = next(node for node in self._graph.nodes if node.op == "output")
        return [*output.all_input_nodes]

    def _written(self) -> Iterator[fx.Node]:
        for node in self._forward:
            if _MUTATING in str(node.target) and node.all_input_nodes:
                yield self.root(node.all_input_nodes[0])

    def _readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the nodes that read a value, also through views."""
        for user in node.users:
            if self.is_view(user):
                yield from self._readers(user)
            else:
                yield user

    def _reads(self, node: fx.Node) -> frozenset[int]:
        """Return the positions in backward that read a value, also through nodes that Inductor fuses."""
        if node not in self._read:
            found: set[int] = set()
            for reader in self._readers(node):
                if reader.op == "output":
                    found.add(len(self._backward) - 1)
                elif reader in self._position:
                    found.add(self._position[reader])
                    found |= frozenset() if self._stays(reader) else self._reads(reader)
            self._read[node] = frozenset(found)
        return self._read[node]

    def _needed(self) -> set[fx.Node]:
        """Return what backward reads of forward, and all that those are computed from."""
        found: set[fx.Node] = set()
        left = [
            self.root(each)
            for node in self._backward
            for each in node.all_input_nodes
            if each in self._forward
        ]
        while left:
            node = left.pop()
            if node in self._forward and node not in found:
                found.add(node)
                left += map(self.root, node.all_input_nodes)
        return found

    def _value(self, node: fx.Node, number: dict[fx.Node, int]) -> Value:
        tensor = isinstance(node.meta.get("val"), torch.Tensor)
        tag = node.meta.get("recompute")
        roots = dict.fromkeys(map(self.root, node.all_input_nodes))
        return Value(
            key=self._keys[node],
            bytes=0 if node in self._outputs else self.bytes(node),
            seconds=self.seconds(node),
            parents=tuple(number[one] for one in roots if one in number),
            uses=tuple(sorted(self._reads(node))),
            stays=tensor and self._stays(node),
            can_save=tensor and tag is not CheckpointPolicy.MUST_RECOMPUTE,
            can_redo=tag is not CheckpointPolicy.MUST_SAVE and self._can_redo(node),
            double=self._double[node],
        )

    def _together(self, nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
        """Yield nodes of inputs alone that share one, in loops of one size, but no products of matrices."""
        readers: defaultdict[tuple[fx.Node, int], list[fx.Node]] = defaultdict(list)
        for node in nodes:
            inputs = {*map(self.root, node.all_input_nodes)}
            if not _flops(node) and all(one.op == "placeholder" for one in inputs):
                for one in inputs:
                    readers[one, _count(node)].append(node)
        for (one, _), several in readers.items():
            if len(several) > 1 and _count(one):
                yield from several

    def _can_redo(self, node: fx.Node) -> bool:
        """Return True if a node computes the same again: no effect, no draw, no input written since."""
        if node.target is operator.getitem:
            return True
        if any(self.root(one) in self._mutated for one in node.all_input_nodes):
            return False
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return isinstance(node.meta.get("val"), torch.SymInt)
        plain = target.namespace in ("aten", "prims") and not target._schema.is_mutable
        return plain and not draws(node)

    def _stays(self, node: fx.Node) -> bool:
        if not self._fuses(node) or node.target is operator.getitem:
            return True
        if self._reduces(node) or node in self._written_out:
            return True
        return any(self._is_kernel(one) for one in self._readers(node))

    def _with_many_reads(self) -> Iterator[fx.Node]:
        """Yield what Inductor would fuse in backward, but for its readers and all that it reads itself."""
        reads: dict[fx.Node, set[fx.Node]] = {}
        for node in self._backward:
            found = [reads.get(one, {one}) for one in map(self.root, node.all_input_nodes)]
            reads[node] = set().union(*found)
            many = len(node.users) > 1 and len(reads[node]) > _READS
            if many and self._fuses(node) and not self.is_view(node):
                yield node
            if many or self._stays(node):
                reads[node] = {node}

    def _reduces(self, node: fx.Node) -> bool:
        return any(self.bytes(one) > 4 * self.bytes(node) for one in node.all_input_nodes)

    def _is_kernel(self, node: fx.Node) -> bool:
        """Return True if a library computes a node, so its inputs and results are in memory."""
        return node.op == "call_function" and not (
            self._fuses(node) or self.is_view(node) or node.target is operator.getitem
        )

    def _gradients(self) -> tuple[int, ...]:
        """Return the bytes of backward's own results that are alive at each position."""
        change = [0] * (len(self._backward) + 1)
        for at, node in enumerate(self._backward):
            if not self.is_view(node) and self._stays(node):
                last = max(self._reads(node), default=at)
                change[at] += self.bytes(node)
                change[last if self._takes_over(node, last) else last + 1] -= self.bytes(node)
        level, levels = 0, []
        for each in change[:-1]:
            level += each
            levels.append(level)
        return tuple(levels)

    def _takes_over(self, node: fx.Node, last: int) -> bool:
        """Return True if the last reader of a result writes its own in the same memory."""
        reader = self._backward[last]
        writes = reader is not node and self._fuses(reader) and self._stays(reader)
        return writes and self.bytes(reader) == self.bytes(node)


def _count(node: fx.Node) -> int:
    """Return the number of a result's elements; none if it is no tensor."""
    value = node.meta.get("val")
    return math.prod(map(hint, value.shape)) if isinstance(value, torch.Tensor) else 0


def _flops(node: fx.Node) -> float:
    target = getattr(node.target, "overloadpacket", node.target)
    count = flop_registry.get(target)
    if count is None:
        return 0.0

    def value(arg: fx.Node) -> Any:
        return arg.meta.get("val")

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    try:
        return float(hint(count(*args, **kwargs, out_val=node.meta.get("val"))))
    except (TypeError, AssertionError, ValueError, RuntimeError):
        return 0.0
