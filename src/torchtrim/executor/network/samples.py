"""Which operators keep the samples of a batch apart, seen from the same network at two sizes of batch.

A dimension that grows with the batch is the batch's. That alone does not tell whether samples see each
other (a softmax over them keeps the shape), so an operator has to be known to keep them apart, in a
table or as one that computes element by element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverloadPacket

from torchtrim.executor.network.captured import Captured, Op, Ref, Value
from torchtrim.executor.network.out_variants import samples_apart

aten = torch.ops.aten
Dims = dict[int, int | None]
_Rule = Callable[[Op, tuple[Value, ...], Dims], bool]


class Along(NamedTuple):
    """The dimension of a value along which its samples lie, and how many elements each has there."""

    dimension: int
    each: int


def along_batch(
    whole: Captured, part: Captured, sizes: tuple[int, int]
) -> list[Along | None] | None:
    """For each value where its samples lie, None for values without; None if the networks differ."""
    if len(whole.ops) != len(part.ops) or len(whole.values) != len(part.values):
        return None
    for one, other in zip(whole.ops, part.ops, strict=True):
        if one.target is not other.target or one.inputs != other.inputs:
            return None
    found: list[Along | None] = []
    for value, smaller in zip(whole.values, part.values, strict=True):
        grown = _grown(value, smaller, sizes)
        if grown is None:
            return None
        found.append(grown or None)
    return found


def _grown(value: Value, smaller: Value, sizes: tuple[int, int]) -> Along | tuple[()] | None:
    """Where it grew; an empty tuple where it did not; None where it grew in another way."""
    if len(value.shape) != len(smaller.shape):
        return None
    differ = [d for d, n in enumerate(value.shape) if n != smaller.shape[d]]
    if not differ:
        return ()
    (dimension, *more), (batch, few) = differ, sizes
    large, small = value.shape[dimension], smaller.shape[dimension]
    if more or large % batch or small % few or large // batch != small // few:
        return None
    return Along(dimension, large // batch)


def keeps_apart(op: Op, values: tuple[Value, ...], along: Sequence[Along | None]) -> bool:
    """Whether the operator's samples do not see each other."""
    dims: Dims = {v: _dimension(along[v]) for v in (*op.inputs, *op.outputs) if v >= 0}
    with_samples = [v for v in op.inputs if dims[v] is not None]
    random = torch.Tag.nondeterministic_seeded in op.target.tags
    if random or any(v >= 0 and dims[v] is None and values[v].bytes for v in op.outputs):
        return not random and not with_samples
    if not with_samples:
        grows = any(v >= 0 and dims[v] is not None for v in op.outputs)
        return not grows or op.target._overloadpacket in _EVEN
    if torch.Tag.pointwise in op.target.tags:
        return _aligned(op, values, dims)
    rule = _RULES.get(op.target._overloadpacket, _by_table)
    return rule(op, values, dims)


def _dimension(along: Along | None) -> int | None:
    return along.dimension if along is not None else None


def _aligned(op: Op, values: tuple[Value, ...], dims: Dims) -> bool:
    """Broadcasting puts samples on samples: counted from the last, they lie in one dimension."""
    places = {dim - len(values[v].shape) for v, dim in dims.items() if dim is not None}
    return len(places) == 1


def _by_table(op: Op, values: tuple[Value, ...], dims: Dims) -> bool:
    which = samples_apart(op, values)
    cut = [op.args[number].value for number in which]
    others = [v for v in op.inputs if v not in cut]
    return bool(which) and all(dims[v] == 0 for v in cut) and all(dims[v] is None for v in others)


def _first(op: Op, values: tuple[Value, ...], dims: Dims) -> bool:
    """Samples in the first dimension of the first argument, and in no other argument."""
    return _only_first(op, dims) and dims[op.args[0].value] == 0


def _only_first(op: Op, dims: Dims) -> bool:
    return isinstance(op.args[0], Ref) and all(
        dims[v] is None for v in op.inputs if v != op.args[0].value
    )


def _not_last(op: Op, values: tuple[Value, ...], dims: Dims) -> bool:
    """A product with a matrix: samples are rows."""
    first = op.args[0].value
    return _only_first(op, dims) and dims[first] != len(values[first].shape) - 1


def _addmm(op: Op, values: tuple[Value, ...], dims: Dims) -> bool:
    added, rows, matrix = (argument.value for argument in op.args[:3])
    return dims[added] is None and dims[rows] == 0 and dims[matrix] is None


def _matmul(op: Op, values: tuple[Value, ...], dims: Dims) -> bool:
    one, other = (argument.value for argument in op.args[:2])
    if dims[other] is None:
        return dims[one] != len(values[one].shape) - 1
    same = len(values[one].shape) == len(values[other].shape) >= 3
    return same and dims[one] == dims[other] == 0


def _viewed(op: Op, values: tuple[Value, ...], dims: Dims) -> bool:
    """A view keeps samples apart if as many elements lie before and after them as before."""
    (source, *_), out = op.inputs, op.outputs[0]
    before, after = dims[source], dims[out]
    if before is None or after is None:
        return False
    ahead = math.prod(values[source].shape[:before])
    return ahead == math.prod(values[out].shape[:after])


def _moved(op: Op, values: tuple[Value, ...], dims: Dims) -> bool:
    """Dimensions change places, appear or go: the batch's own is found again by its size."""
    return True


def _elsewhere(position: int, name: str, default: Any = None) -> _Rule:
    """Works along dimensions that an argument names, and samples lie in another."""

    def rule(op: Op, values: tuple[Value, ...], dims: Dims) -> bool:
        sources = [v for v in op.inputs if dims[v] is not None]
        given = op.args[position] if len(op.args) > position else op.kwargs.get(name, default)
        if given is None:
            return False
        named = given if isinstance(given, (list, tuple)) else [given]
        return (
            all(dims[v] not in {d % max(len(values[v].shape), 1) for d in named} for v in sources)
            and len({dims[v] for v in sources}) == 1
        )

    return rule


def _layer_norm(op: Op, values: tuple[Value, ...], dims: Dims) -> bool:
    first, normed = op.args[0].value, len(op.args[1])
    dim = dims[first]
    return _only_first(op, dims) and dim is not None and dim < len(values[first].shape) - normed


def _padded(op: Op, values: tuple[Value, ...], dims: Dims) -> bool:
    first = op.args[0].value
    dim = dims[first]
    return dim is not None and dim < len(values[first].shape) - len(op.args[1]) // 2


def _pooled(dimensions: int) -> _Rule:
    """Of inputs with a dimension of samples; without one the first are channels."""

    def rule(op: Op, values: tuple[Value, ...], dims: Dims) -> bool:
        return len(values[op.args[0].value].shape) == dimensions and _first(op, values, dims)

    return rule


def _embedding(op: Op, values: tuple[Value, ...], dims: Dims) -> bool:
    return dims[op.args[0].value] is None


_SAME = (aten.clone, aten.alias, aten.detach, aten._to_copy, aten.to, aten.contiguous)
_VIEWS = (aten.view, aten.reshape, aten._unsafe_view, aten.flatten, aten.unflatten)
_MOVES = (aten.permute, aten.transpose, aten.t, aten.unsqueeze, aten.squeeze, aten.expand)
_REDUCED = (
    aten.mean,
    aten.sum,
    aten.amax,
    aten.amin,
    aten.prod,
    aten.logsumexp,
    aten.any,
    aten.all,
)
_RESIZED = (
    aten.upsample_nearest2d,
    aten.upsample_bilinear2d,
    aten.upsample_bicubic2d,
    aten.pixel_shuffle,
    aten.pixel_unshuffle,
)

_EVEN = frozenset((aten.zeros, aten.ones, aten.full, aten.expand))
"""What makes samples of nothing, all of them the same."""

_RULES: dict[OpOverloadPacket, _Rule] = {
    **dict.fromkeys((*_SAME, *_MOVES), _moved),
    **dict.fromkeys(_VIEWS, _viewed),
    **dict.fromkeys(_REDUCED, _elsewhere(1, "dim")),
    **dict.fromkeys(_RESIZED, _pooled(4)),
    aten.select: _elsewhere(1, "dim", 0),
    aten.slice: _elsewhere(1, "dim", 0),
    aten.narrow: _elsewhere(1, "dim"),
    aten.split: _elsewhere(2, "dim", 0),
    aten.split_with_sizes: _elsewhere(2, "dim", 0),
    aten.chunk: _elsewhere(2, "dim", 0),
    aten.unbind: _elsewhere(1, "dim", 0),
    aten.cat: _elsewhere(1, "dim", 0),
    aten.softmax: _elsewhere(1, "dim"),
    aten.log_softmax: _elsewhere(1, "dim"),
    aten._softmax: _elsewhere(1, "dim"),
    aten._log_softmax: _elsewhere(1, "dim"),
    aten.layer_norm: _layer_norm,
    aten._native_batch_norm_legit_no_training: _first,
    aten.linear: _not_last,
    aten.mm: _not_last,
    aten.addmm: _addmm,
    aten.matmul: _matmul,
    aten.bmm: _matmul,
    aten.max_pool2d: _pooled(4),
    aten.avg_pool2d: _pooled(4),
    aten.max_pool2d_with_indices: _pooled(4),
    aten.pad: _padded,
    aten.constant_pad_nd: _padded,
    aten.embedding: _embedding,
}
