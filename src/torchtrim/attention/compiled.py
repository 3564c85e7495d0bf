"""The path of a CPU with numba: torch's matrix products, compiled loops between them."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchtrim.attention import compiled_tiles as tiles
from torchtrim.attention.buckets import Maps, maps_of
from torchtrim.attention.compiled_rows import CHUNK, LANES, MANY_LANES
from torchtrim.attention.core import Gradients, Inputs, Outcome, blocks
from torchtrim.attention.dropout import threshold

_SCORES = 1 << 17
_EMPTY = np.empty((0, 0, 0), np.float32)
Array = Any


def forward(inputs: Inputs, *, with_sums: bool) -> Outcome:
    """See `core.Path`."""
    number, length, dim = inputs.q.shape
    height, wide, skip = inputs.maps.height, inputs.maps.width, inputs.maps.skip
    by_column = _Order(height, wide, skip)
    q = by_column(inputs.q, inputs.scale)
    keys = inputs.k.transpose(1, 2)
    out = torch.empty_like(inputs.v)
    lse = inputs.q.new_empty(number, length)
    sums = _zeros(inputs) if with_sums else None
    room, maps = _room(inputs.maps), _maps(inputs.maps.key)
    lookups = (_array(inputs.k_lookup), _array(inputs.q_lookup))
    rest = (_masks(inputs), _drop(inputs), room, maps, (lse.numpy(), _array(sums)))
    buffer, flat = _buffer(number, length, dim)
    for rows, heads in blocks(number, length, dim, _SCORES):
        scores = _view(buffer, rows, heads, length)
        torch.bmm(q[heads, rows], keys[heads], out=scores)
        tiles.forward_tile(flat, _place(rows, heads), lookups, *rest)
        torch.bmm(scores, inputs.v[heads], out=out[heads, rows])
    return Outcome(by_column.back(out), lse, sums)


def backward(
    inputs: Inputs, grad: Tensor, lse: Tensor, delta: Tensor, v_lookup: Tensor | None
) -> Gradients:
    """See `core.Path`."""
    number, length, dim = inputs.q.shape
    by_column = _Order(inputs.maps.height, inputs.maps.width, inputs.maps.skip)
    q, grad = by_column(inputs.q, inputs.scale), by_column(grad, 1.0)
    keys, values = inputs.k.transpose(1, 2), inputs.v.transpose(1, 2)
    of_q = torch.empty_like(q)
    of_k, of_v = q.new_zeros(keys.shape), q.new_zeros(values.shape)
    asked = (inputs.k_lookup, inputs.q_lookup, v_lookup)
    of_k_lookup, of_q_lookup, sums = (_zeros(inputs) if x is not None else None for x in asked)
    room, maps = _room(inputs.maps), _maps(inputs.maps.key)
    lookups = tuple(map(_array, asked))
    results = (
        np.zeros_like(room[3]),
        *map(_array, (of_q_lookup, of_k_lookup, sums)),
        lse.numpy(),
        delta.contiguous().numpy(),
    )
    rest = (lookups, _masks(inputs), _drop(inputs), room, maps, results)
    buffer, flat = _buffer(number, length, dim)
    other, other_flat = _buffer(number, length, dim)
    rows = slice(0, length)
    for rows, heads in blocks(number, length, dim, _SCORES):
        weights, slopes = (_view(one, rows, heads, length) for one in (buffer, other))
        torch.bmm(q[heads, rows], keys[heads], out=weights)
        torch.bmm(grad[heads, rows], values[heads], out=slopes)
        tiles.backward_tile((flat, other_flat), _place(rows, heads), *rest)
        torch.bmm(slopes, inputs.k[heads], out=of_q[heads, rows])
        _add_product(of_v, heads, weights, grad[heads, rows])
        _add_product(of_k, heads, slopes, q[heads, rows])
    whole = rows.stop - rows.start == length
    of_k, of_v = _straight(of_k, whole), _straight(of_v, whole)
    of_q = by_column.back(of_q).mul_(inputs.scale)
    return Gradients(of_q, of_k, of_v, of_k_lookup, of_q_lookup, sums)


def _add_product(total: Tensor, heads: slice, scores: Tensor, x: Tensor) -> None:
    """Add scores' x to the transposed total; all queries at once need no sum before."""
    if scores.shape[1] == scores.shape[2]:
        torch.bmm(scores.transpose(1, 2), x, out=total.view(len(total), *x.shape[1:])[heads])
    else:
        total[heads].baddbmm_(x.transpose(1, 2), scores)


def _straight(total: Tensor, tall: bool) -> Tensor:
    return (
        total.view(len(total), *total.shape[:0:-1]) if tall else total.transpose(1, 2).contiguous()
    )


class _Order:
    """Tokens of the grid column by column, and back; skip tokens stay in front."""

    def __init__(self, height: int, wide: int, skip: int) -> None:
        self.height, self.wide, self.skip = height, wide, skip

    def __call__(self, x: Tensor, scale: float) -> Tensor:
        return self._turned(x, self.height, self.wide) * scale

    def back(self, x: Tensor) -> Tensor:
        """The usual order again."""
        return self._turned(x, self.wide, self.height).contiguous()

    def _turned(self, x: Tensor, first: int, second: int) -> Tensor:
        grid = x[:, self.skip :].reshape(len(x), first, second, x.shape[2])
        turned = grid.transpose(1, 2).reshape(len(x), first * second, x.shape[2])
        return torch.cat([x[:, : self.skip], turned], 1) if self.skip else turned


def _buffer(number: int, length: int, dim: int) -> tuple[Tensor, Array]:
    rows, heads = next(blocks(max(number, 1), length, dim, _SCORES))
    size = rows.stop * heads.stop * length
    buffer = torch.empty(size + 2 * LANES)
    return buffer, buffer.numpy()


def _view(buffer: Tensor, rows: slice, heads: slice, length: int) -> Tensor:
    shape = (heads.stop - heads.start, rows.stop - rows.start, length)
    return buffer[: shape[0] * shape[1] * shape[2]].view(shape)


def _place(rows: slice, heads: slice) -> tuple[int, int, int, int]:
    return heads.start, heads.stop - heads.start, rows.start, rows.stop - rows.start


def _zeros(inputs: Inputs) -> Tensor:
    return inputs.q.new_zeros((*inputs.q.shape[:2], inputs.maps.buckets))


def _array(x: Tensor | None) -> Array:
    return _EMPTY if x is None else x.contiguous().numpy()


def _masks(inputs: Inputs) -> tuple[int, Array, Array]:
    """0, 1 or 2 for none, one that allows, one that is added; and both, of which one is used."""
    mask = inputs.mask
    allowed = np.zeros((1, 1, 1, 1), np.bool_)
    added = np.zeros((1, 1, 1, 1), np.float32)
    if mask is None:
        return 0, _twice(allowed), _twice(added)
    if mask.dtype == torch.bool:
        return 1, _twice(mask.numpy()), _twice(added)
    return 2, _twice(allowed), _twice(mask.float().numpy())


def _twice(x: Array) -> Array:
    """The array two times in the same memory: never contiguous, so that loops compile once."""
    return np.lib.stride_tricks.as_strided(x, (2, *x.shape), (0, *x.strides), writeable=False)


def _drop(inputs: Inputs) -> tuple[Any, Any, Any]:
    if inputs.dropout is None:
        return np.uint64(0), np.uint64(0), np.float32(1)
    p = inputs.dropout.p
    seed, below = int(inputs.dropout.seed), threshold(p)
    return np.uint64(seed), np.uint64(below), np.float32(1.0 / (1.0 - p))


def _padded(size: int, to: int) -> int:
    return (size + to - 1) // to * to


def _room(maps: Maps) -> tuple[Array, ...]:
    """Where rows are worked on: a row, the slabs of keys and of sums, what keys say of a column,
    lanes, exponents and the same as floats, what dropout keeps, the slab of values, another row."""
    groups, wide = len(maps.pattern), _padded(maps.width, CHUNK)
    row, slab = _padded(maps.tokens, MANY_LANES) + LANES, groups * wide
    sizes = (row, slab, slab, groups * maps.tokens, MANY_LANES, row, row, slab, row)
    ends = list(accumulate(_padded(size, LANES) for size in sizes))
    space = np.zeros(ends[-1], np.float32)
    parts = [space[end - _padded(n, LANES) : end][:n] for end, n in zip(ends, sizes, strict=True)]
    t, of_keys, of_sums, column, lanes, powers, keep, of_values, other = parts
    slabs = (of_keys, of_sums, of_values)
    of_keys, of_sums, of_values = (one.reshape(groups, wide) for one in slabs)
    column = column.reshape(groups, maps.tokens)
    return t, of_keys, of_sums, column, lanes, powers.view(np.int32), powers, keep, of_values, other


@lru_cache(maxsize=64)
def _maps(key: str) -> tuple[Any, ...]:
    """Numbers of the grid, groups, patterns, the groups that each row uses, reversed patterns."""
    maps = maps_of(key, torch.device("cpu"))
    group, pattern = maps.group.numpy().view(np.uint32), maps.pattern.numpy().view(np.uint32)
    seen = [group[y : y + maps.height] for y in range(maps.height)]
    used = np.array([(one.min(), one.max() + 1) for one in seen], np.int64)
    padded = _padded(maps.width, CHUNK)
    geometry = (maps.height, maps.width, maps.skip, maps.tokens, padded, *maps.extra)
    return geometry, group, pattern, used, np.ascontiguousarray(pattern[:, ::-1])
