"""Run the first operators of a network on parts of the batch, and the rest on the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket

from torchtrim.errors import Unsupported
from torchtrim.executor.network.captured import Captured, NetworkValue, Op, Ref, Source
from torchtrim.executor.network.out_variants import samples_apart
from torchtrim.executor.network.program import NetworkProgram, Switches, fresh, graph_of
from torchtrim.memory.network import best_cut, home_lives
from torchtrim.records.network_graph import GraphMemory, GraphOperator, NetworkGraph, Section
from torchtrim.records.profile import strides_of

aten = torch.ops.aten
Dims = dict[int, int | None]
_Rule = Callable[[Op, tuple[NetworkValue, ...], Dims], bool]


class BatchDim(NamedTuple):
    """The batch dimension of a value, and the number of elements per sample in it."""

    dimension: int
    each: int


def along_batch(whole: Captured, part: Captured, sizes: tuple[int, int]) -> list[BatchDim | None]:
    """Return each value's batch dimension or None. Raises `Unsupported` if the networks differ."""
    differ = Unsupported(f"its network for {sizes[1]} samples differs from that for {sizes[0]}")
    if len(whole.ops) != len(part.ops) or len(whole.values) != len(part.values):
        raise differ
    for one, other in zip(whole.ops, part.ops, strict=True):
        if one.target is not other.target or one.inputs != other.inputs:
            raise differ
    grown = [_grown(*pair, sizes) for pair in zip(whole.values, part.values, strict=True)]
    if None in grown:
        raise differ
    return [dimension or None for dimension in grown]


def _grown(
    value: NetworkValue, smaller: NetworkValue, sizes: tuple[int, int]
) -> BatchDim | tuple[()] | None:
    """Return the dimension that grew with the batch, () if none did, or None for any other change."""
    if len(value.shape) != len(smaller.shape):
        return None
    differ = [d for d, n in enumerate(value.shape) if n != smaller.shape[d]]
    if not differ:
        return ()
    (dimension, *more), (batch, few) = differ, sizes
    large, small = value.shape[dimension], smaller.shape[dimension]
    if more or large % batch or small % few or large // batch != small // few:
        return None
    return BatchDim(dimension, large // batch)


def keeps_apart(op: Op, values: tuple[NetworkValue, ...], along: Sequence[BatchDim | None]) -> bool:
    """Return True if the operator's samples are independent."""
    dims: Dims = {
        v: (place := along[v]) and place.dimension for v in (*op.inputs, *op.outputs) if v >= 0
    }
    with_samples = [v for v in op.inputs if dims[v] is not None]
    random = torch.Tag.nondeterministic_seeded in op.target.tags
    if random or any(v >= 0 and dims[v] is None and values[v].bytes for v in op.outputs):
        return not random and not with_samples
    if not with_samples:
        grows = any(v >= 0 and dims[v] is not None for v in op.outputs)
        return not grows or op.target._overloadpacket in _EVEN
    if torch.Tag.pointwise in op.target.tags:
        # Broadcasting aligns samples that have the same dimension, counted from the last.
        return len({d - len(values[v].shape) for v, d in dims.items() if d is not None}) == 1
    return _RULES.get(op.target._overloadpacket, _by_table)(op, values, dims)


def _by_table(op: Op, values: tuple[NetworkValue, ...], dims: Dims) -> bool:
    which = samples_apart(op, values)
    cut = [op.args[number].value for number in which]
    others = [v for v in op.inputs if v not in cut]
    return bool(which) and all(dims[v] == 0 for v in cut) and all(dims[v] is None for v in others)


def _first(op: Op, values: tuple[NetworkValue, ...], dims: Dims) -> bool:
    """Return True if only the first argument has samples, in its first dimension."""
    return _only_first(op, dims) and dims[op.args[0].value] == 0


def _only_first(op: Op, dims: Dims) -> bool:
    return isinstance(op.args[0], Ref) and all(
        dims[v] is None for v in op.inputs if v != op.args[0].value
    )


def _not_last(op: Op, values: tuple[NetworkValue, ...], dims: Dims) -> bool:
    """Return True for a product with a matrix if samples are rows."""
    first = op.args[0].value
    return _only_first(op, dims) and dims[first] != len(values[first].shape) - 1


def _matmul(op: Op, values: tuple[NetworkValue, ...], dims: Dims) -> bool:
    one, other = (argument.value for argument in op.args[:2])
    if dims[other] is None:
        return dims[one] != len(values[one].shape) - 1
    same = len(values[one].shape) == len(values[other].shape) >= 3
    return same and dims[one] == dims[other] == 0


def _viewed(op: Op, values: tuple[NetworkValue, ...], dims: Dims) -> bool:
    """Return True if a view keeps the number of elements before and after the batch dimension."""
    (source, *_), out = op.inputs, op.outputs[0]
    before, after = dims[source], dims[out]
    if before is None or after is None:
        return False
    return math.prod(values[source].shape[:before]) == math.prod(values[out].shape[:after])


def _elsewhere(position: int, name: str, default: Any = None) -> _Rule:
    """Return a check that the dimensions named by an argument exclude the batch dimension."""

    def rule(op: Op, values: tuple[NetworkValue, ...], dims: Dims) -> bool:
        sources = [v for v in op.inputs if dims[v] is not None]
        named = op.args[position] if len(op.args) > position else op.kwargs.get(name, default)
        if named is None or len({dims[v] for v in sources}) != 1:
            return False
        named = named if isinstance(named, (list, tuple)) else [named]
        return all(
            dims[v] not in {d % max(len(values[v].shape), 1) for d in named} for v in sources
        )

    return rule


def _leading(each: int, op: Op, values: tuple[NetworkValue, ...], dims: Dims) -> bool:
    """Return True if samples precede the last dimensions: one for `each` numbers of the second argument."""
    first = op.args[0].value
    dim, end = dims[first], len(values[first].shape) - len(op.args[1]) // each
    return _only_first(op, dims) and dim is not None and dim < end


def _pooled(op: Op, values: tuple[NetworkValue, ...], dims: Dims) -> bool:
    """Return True for a batched input; in an unbatched one channels come first."""
    return len(values[op.args[0].value].shape) == 4 and _first(op, values, dims)


_EVEN = frozenset((aten.zeros, aten.ones, aten.full, aten.expand))
"""Operators that return equal samples."""
_SAME = (aten.clone, aten.alias, aten.detach, aten._to_copy, aten.to, aten.contiguous)
_MOVES = (aten.permute, aten.transpose, aten.t, aten.unsqueeze, aten.squeeze, aten.expand)
_VIEWS = (aten.view, aten.reshape, aten._unsafe_view, aten.flatten, aten.unflatten)
_REDUCED = ("mean", "sum", "amax", "amin", "prod", "logsumexp", "any", "all", "narrow")
_SOFTMAX = ("softmax", "log_softmax", "_softmax", "_log_softmax")
_RESIZED = ("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d")
_SHUFFLED = ("pixel_shuffle", "pixel_unshuffle")
_POOLED = ("max_pool2d", "avg_pool2d", "max_pool2d_with_indices")

_RULES: dict[OpOverloadPacket, _Rule] = {
    # Permuted, added or removed dimensions: `along_batch` found the batch dimension by its size.
    **dict.fromkeys((*_SAME, *_MOVES), lambda *_: True),
    **dict.fromkeys(_VIEWS, _viewed),
    **{getattr(aten, name): _elsewhere(1, "dim") for name in (*_REDUCED, *_SOFTMAX)},
    **{getattr(aten, name): _pooled for name in (*_RESIZED, *_SHUFFLED, *_POOLED)},
    **dict.fromkeys((aten.select, aten.slice, aten.unbind, aten.cat), _elsewhere(1, "dim", 0)),
    **dict.fromkeys((aten.split, aten.split_with_sizes, aten.chunk), _elsewhere(2, "dim", 0)),
    **dict.fromkeys((aten.linear, aten.mm), _not_last),
    **dict.fromkeys((aten.matmul, aten.bmm), _matmul),
    **dict.fromkeys((aten.pad, aten.constant_pad_nd), partial(_leading, 2)),
    aten.layer_norm: partial(_leading, 1),
    aten._native_batch_norm_legit_no_training: _first,
    aten.addmm: lambda op, _, dims: [dims[one.value] for one in op.args[:3]] == [None, 0, None],
    aten.embedding: lambda op, values, dims: dims[op.args[0].value] is None,
}


Recapture = Callable[[Sequence[Any]], Captured]


class PartsProgram:
    """A network that runs in parts. Any number of threads may run it.

    `parts`: samples in each part. `position`: the number of operators that run in parts, out of `of`.
    """

    def __init__(
        self,
        captured: Captured,
        inputs: Sequence[Any],
        parts: int,
        switches: Switches,
        recapture: Recapture,
    ) -> None:
        self.captured = captured
        self._batch, self._batched = batch_of(inputs)
        self.parts = _sizes(self._batch, parts)
        few = {size: recapture(self._part(inputs, 0, size)) for size in set(self.parts)}
        for size, network in few.items():
            along = along_batch(captured, network, (self._batch, size))
        order = NetworkProgram(captured, switches).layout.order
        cut = best_cut(
            graph_of(captured)[0],
            graph_of(few[self.parts[0]], self._batch / self.parts[0])[0],
            order,
            _last_apart(captured, order, along),
        )
        if not cut.position:
            raise Unsupported(
                "running its first operators on parts of the batch would not reduce memory"
            )
        self.position, self.of = cut.position, len(order)
        first, rest = order[: cut.position], order[cut.position :]
        self._along, self._carried = along, _carried(captured, first, rest)
        results = tuple(map(Ref, self._carried))
        self._first = {
            size: NetworkProgram(
                network._replace(ops=tuple(network.ops[n] for n in first), results=results),
                switches,
                whole=self._batch / size,
            )
            for size, network in few.items()
        }
        self._rest = NetworkProgram(_ending(captured, rest, self._carried, len(inputs)), switches)

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of a call."""
        return self._kept + max(program.layout.peak for program in self._programs)

    @property
    def output_bytes(self) -> int:
        """Peak bytes of results and arena during a call."""
        return self._kept + max(program.layout.outputs for program in self._programs)

    @property
    def made_bytes(self) -> int:
        """Bytes of all separate allocations and of the arenas of one part and of the rest."""
        first = max(program.made_bytes for program in self._first.values())
        return self._kept + first + self._rest.made_bytes

    @property
    def both(self) -> tuple[NetworkProgram, NetworkProgram]:
        """The programs of the largest part and of the rest."""
        return self._first[max(self.parts)], self._rest

    @property
    def _programs(self) -> list[NetworkProgram]:
        return [*self._first.values(), self._rest]

    @property
    def _kept(self) -> int:
        return sum(self.captured.values[v].bytes for v in self._carried)

    def run(self, inputs: Sequence[Any], tensors: Mapping[str, Tensor]) -> list[Any]:
        """Return the results, flat, like `NetworkProgram.run`."""
        values = [self.captured.values[v] for v in self._carried]
        whole = [fresh(value._replace(strides=_dense(value))) for value in values]
        at = 0
        for size in self.parts:
            results = self._first[size].run(self._part(inputs, at, size), tensors)
            for place, result, value in zip(whole, results, self._carried, strict=True):
                if (along := self._along[value]) is not None:
                    place = place.narrow(along.dimension, at * along.each, size * along.each)
                place.copy_(result)
            del results
            at += size
        return self._rest.run([*inputs, *whole], tensors)

    def _part(self, inputs: Sequence[Any], at: int, size: int) -> list[Any]:
        return [
            leaf[at : at + size] if number in self._batched else leaf
            for number, leaf in enumerate(inputs)
        ]


PlannedProgram = NetworkProgram | PartsProgram


def batch_of(inputs: Sequence[Any]) -> tuple[int, frozenset[int]]:
    """Return the batch size, the most frequent first dimension, and the inputs that have it."""
    lengths = {
        number: leaf.shape[0]
        for number, leaf in enumerate(inputs)
        if isinstance(leaf, Tensor) and leaf.dim()
    }
    sizes = list(lengths.values())
    batch = max(sizes, key=sizes.count, default=0)
    return batch, frozenset(number for number, length in lengths.items() if length == batch)


def _sizes(batch: int, parts: int) -> tuple[int, ...]:
    if batch < 2:
        raise Unsupported("a batch of one sample cannot be split")
    size = -(-batch // min(parts, batch))
    sizes = [size] * (batch // size)
    return (*sizes, batch % size) if batch % size else tuple(sizes)


def _last_apart(captured: Captured, order: Sequence[int], along: Sequence[BatchDim | None]) -> int:
    """Return the number of operators with independent samples before the first without."""
    if captured.updates:
        return 0
    apart = (keeps_apart(captured.ops[number], captured.values, along) for number in order)
    return next((position for position, keeps in enumerate(apart) if not keeps), len(order))


def _carried(captured: Captured, first: Sequence[int], rest: Sequence[int]) -> list[int]:
    made = {v for number in first for v in captured.ops[number].outputs if v >= 0}
    wanted = [v for number in rest for v in captured.ops[number].inputs]
    wanted += [r.value for r in captured.results if isinstance(r, Ref)]
    return [v for v in dict.fromkeys(wanted) if v in made]


def _ending(
    network: Captured, rest: Sequence[int], carried: Sequence[int], inputs: int
) -> Captured:
    values, memories = list(network.values), list(network.memories)
    sources = list(network.sources)
    for key, number in enumerate(carried, inputs):
        value = values[number]
        values[number] = value._replace(
            memory=len(memories), ours=False, offset=0, strides=_dense(value)
        )
        memories.append(value.bytes)
        sources.append(Source("input", key, number))
    return network._replace(
        ops=tuple(network.ops[number] for number in rest),
        values=tuple(values),
        memories=tuple(memories),
        sources=tuple(sources),
    )


def _dense(value: NetworkValue) -> tuple[int, ...]:
    """Return dense strides in the value's order of dimensions."""
    order = sorted(range(len(value.shape)), key=lambda d: (-value.strides[d], d))
    return strides_of(value.shape, order)


def graph_record(model: str, program: PlannedProgram) -> NetworkGraph:
    """Return the operators in order of execution, and the memory that values share."""
    if isinstance(program, NetworkProgram):
        return NetworkGraph(model=model, sections=(_section(program, "the whole batch"),))
    first, rest = program.both
    batch, most = sum(program.parts), max(program.parts)
    sections = [_section(first, f"{len(program.parts)} parts of {most} of {batch} samples")]
    if rest.captured.ops:
        sections.append(_section(rest, "the whole batch"))
    return NetworkGraph(model=model, sections=tuple(sections))


def _section(program: NetworkProgram, title: str) -> Section:
    layout, graph = program.layout, program.graph
    spans = home_lives(graph, layout.order, layout.homes)
    numbers = {home: number for number, home in enumerate(spans)}
    places = {number: position for position, number in enumerate(layout.order)}
    memories = tuple(
        GraphMemory(bytes=size, first=first, last=last, offset=layout.offsets.get(home, -1))
        for home, (first, last, size) in spans.items()
    )
    operators = []
    for number in layout.order:
        op, node = program.captured.ops[number], graph.nodes[number]
        value = next((program.captured.values[v] for v in op.outputs if v >= 0), None)
        operators.append(
            GraphOperator(
                name=op.target.name().removeprefix("aten::"),
                module=op.module,
                shape=value.shape if value is not None else (),
                dtype=str(value.dtype).removeprefix("torch.") if value is not None else "",
                reads=tuple(dict.fromkeys(numbers[layout.homes[b]] for b in node.reads)),
                writes=tuple(dict.fromkeys(numbers[layout.homes[b]] for b in node.makes)),
                needs=tuple(sorted({places[n] for n in node.needs})),
                takes_over=any(layout.homes[b] != b for b in node.makes),
            )
        )
    return Section(title=title, operators=tuple(operators), memories=memories, height=layout.height)
