"""The path of a CPU with numba: torch's matrix products, compiled loops between them."""

from __future__ import annotations

import threading
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchtrim.attention import compiled_short as shorts
from torchtrim.attention import compiled_tiles as tiles
from torchtrim.attention.buckets import Maps, maps_of
from torchtrim.attention.compiled_rows import CHUNK, LANES, MANY_LANES
from torchtrim.attention.core import Gradients, Inputs, Outcome, blocks
from torchtrim.attention.dropout import threshold

_SCORES = 1 << 17
_MOST_KEPT = _SCORES + 2 * LANES
_SHORT = 100
_MOST_ROOMS = 64
_EMPTY, _NONE = np.empty((0, 0, 0), np.float32), np.empty((0, 0), np.float32)
Array = Any
Parts = tuple[tuple[slice, slice], ...]


def forward(inputs: Inputs, *, with_sums: bool) -> Outcome:
    """See `core.Path`."""
    number, length, dim = inputs.q.shape
    order = _Order(inputs.maps)
    q = order(inputs.q)
    keys = inputs.k.transpose(1, 2)
    out = torch.empty_like(inputs.v)
    lse = inputs.q.new_empty(number, length)
    sums = _lookups(inputs) if with_sums else None
    room = _room(inputs.maps.key)
    short = length <= _SHORT
    lookups = (_array(inputs.k_lookup), _array(inputs.q_lookup, flat=short))
    rest = (_masks(inputs), _drop(inputs), room, _maps(inputs.maps.key))
    results = (lse.numpy(), _array(sums))
    parts = blocks(number, length, dim, _SCORES)
    (buffer, flat), _ = _buffers(parts, length)
    for rows, heads in parts:
        scores = _view(buffer, rows, heads, length)
        _product(_cut(q, heads, rows), _cut(keys, heads), inputs.scale, scores)
        tile = shorts.forward_short if short else tiles.forward_tile
        tile(flat, _place(rows, heads), lookups, *rest, results)
        torch.bmm(scores, _cut(inputs.v, heads), out=_cut(out, heads, rows))
    return Outcome(order.back(out), lse, sums)


def backward(
    inputs: Inputs, grad: Tensor, lse: Tensor, delta: Tensor, v_lookup: Tensor | None
) -> Gradients:
    """See `core.Path`."""
    number, length, dim = inputs.q.shape
    order = _Order(inputs.maps)
    q, grad = order(inputs.q), order(grad)
    keys, values = inputs.k.transpose(1, 2), inputs.v.transpose(1, 2)
    asked = (inputs.k_lookup, inputs.q_lookup, v_lookup)
    of_k_lookup, of_q_lookup, sums = (_lookups(inputs) if x is not None else None for x in asked)
    room = _room(inputs.maps.key)
    short = length <= _SHORT
    back = () if short else (np.zeros_like(room[3]),)
    results = (
        *back,
        _array(of_q_lookup, flat=short),
        *map(_array, (of_k_lookup, sums)),
        lse.numpy(),
        delta.contiguous().numpy(),
    )
    rest = (_masks(inputs), _drop(inputs), room, _maps(inputs.maps.key), results)
    lookups = (
        _array(inputs.k_lookup),
        _array(inputs.q_lookup, flat=short),
        _array(v_lookup),
    )
    parts = blocks(number, length, dim, _SCORES)
    (buffer, flat), (other, other_flat) = _buffers(parts, length)
    totals = _Totals(inputs, whole=parts[0][0] == slice(0, length) if parts else True)
    of_q = torch.empty_like(q)
    for rows, heads in parts:
        weights, slopes = (_view(one, rows, heads, length) for one in (buffer, other))
        own_q, own_grad = _cut(q, heads, rows), _cut(grad, heads, rows)
        _product(own_q, _cut(keys, heads), inputs.scale, weights)
        torch.bmm(own_grad, _cut(values, heads), out=slopes)
        tile = shorts.backward_short if short else tiles.backward_tile
        tile((flat, other_flat), _place(rows, heads), lookups, *rest)
        _product(slopes, _cut(inputs.k, heads), inputs.scale, _cut(of_q, heads, rows))
        totals.add(heads, weights, slopes, own_grad, own_q)
    return Gradients(order.back(of_q), totals.k, totals.v, of_k_lookup, of_q_lookup, sums)


def _product(x: Tensor, y: Tensor, scale: float, out: Tensor) -> None:
    """out = scale x y, whatever was in it."""
    torch.baddbmm(out, x, y, beta=0, alpha=scale, out=out)


class _Totals:
    """Gradients of keys and values; where a block has all queries, they are its products, else the
    transposed products add up."""

    def __init__(self, inputs: Inputs, *, whole: bool) -> None:
        self._scale, self._whole = inputs.scale, whole
        self._k, self._v = (
            torch.empty_like(x) if whole else x.new_zeros(len(x), x.shape[2], x.shape[1])
            for x in (inputs.k, inputs.v)
        )

    def add(self, heads: slice, weights: Tensor, slopes: Tensor, grad: Tensor, q: Tensor) -> None:
        """The sums over a block of queries."""
        if self._whole:
            torch.bmm(weights.transpose(1, 2), grad, out=_cut(self._v, heads))
            _product(slopes.transpose(1, 2), q, self._scale, _cut(self._k, heads))
        else:
            self._v[heads].baddbmm_(grad.transpose(1, 2), weights)
            self._k[heads].baddbmm_(q.transpose(1, 2), slopes, alpha=self._scale)

    @property
    def k(self) -> Tensor:
        """Of keys, (N, L, D)."""
        return self._k if self._whole else self._k.transpose(1, 2).contiguous()

    @property
    def v(self) -> Tensor:
        """Of values, (N, L, D)."""
        return self._v if self._whole else self._v.transpose(1, 2).contiguous()


class _Order:
    """Tokens of the grid as they are if they are few, else column by column; skip tokens in front."""

    def __init__(self, maps: Maps) -> None:
        self._maps, self._straight = maps, maps.tokens <= _SHORT

    def __call__(self, x: Tensor) -> Tensor:
        return x if self._straight else self._turned(x, self._maps.height, self._maps.width)

    def back(self, x: Tensor) -> Tensor:
        """The usual order again."""
        if self._straight:
            return x
        return self._turned(x, self._maps.width, self._maps.height).contiguous()

    def _turned(self, x: Tensor, first: int, second: int) -> Tensor:
        skip = self._maps.skip
        grid = x[:, skip:].reshape(len(x), first, second, x.shape[2])
        turned = grid.transpose(1, 2).reshape(len(x), first * second, x.shape[2])
        return torch.cat([x[:, :skip], turned], 1) if skip else turned


class _Kept(threading.local):
    """What this thread works in, from call to call; what is large is not kept."""

    def __init__(self) -> None:
        self.buffers: tuple[tuple[Tensor, Array], tuple[Tensor, Array]] | None = None
        self.rooms: dict[str, tuple[Array, ...]] = {}


_kept = _Kept()


def _buffers(parts: Parts, length: int) -> tuple[tuple[Tensor, Array], ...]:
    """Two buffers for a block of scores, and the same as arrays."""
    rows, heads = parts[0] if parts else (slice(0, 0), slice(0, 0))
    size = rows.stop * heads.stop * length + 2 * LANES
    if _kept.buffers is not None and size <= _MOST_KEPT:
        return _kept.buffers
    one, other = (torch.empty(max(size, _MOST_KEPT), device="cpu") for _ in range(2))
    made = ((one, one.numpy()), (other, other.numpy()))
    if size <= _MOST_KEPT:
        _kept.buffers = made
    return made


def _cut(x: Tensor, heads: slice, rows: slice | None = None) -> Tensor:
    """The rows of some heads, without a view where that is all of it."""
    whole = heads.stop - heads.start == x.shape[0]
    if rows is None or rows.stop - rows.start == x.shape[1]:
        return x if whole else x[heads]
    return x[heads, rows]


def _view(buffer: Tensor, rows: slice, heads: slice, length: int) -> Tensor:
    shape = (heads.stop - heads.start, rows.stop - rows.start, length)
    return buffer[: shape[0] * shape[1] * shape[2]].view(shape)


def _place(rows: slice, heads: slice) -> tuple[int, int, int, int]:
    return heads.start, heads.stop - heads.start, rows.start, rows.stop - rows.start


def _lookups(inputs: Inputs) -> Tensor:
    return inputs.q.new_empty((*inputs.q.shape[:2], inputs.maps.buckets))


def _array(x: Tensor | None, *, flat: bool = False) -> Array:
    if x is None:
        return _NONE if flat else _EMPTY
    return (x.flatten(1) if flat else x).contiguous().numpy()


def _masks(inputs: Inputs) -> tuple[int, Array, Array]:
    """0, 1 or 2 for none, one that allows, one that is added; and both, of which one is used."""
    mask = inputs.mask
    if mask is None:
        return _NO_MASK
    if mask.dtype == torch.bool:
        return 1, _twice(mask.numpy()), _NO_MASK[2]
    return 2, _NO_MASK[1], _twice(mask.float().numpy())


def _twice(x: Array) -> Array:
    """The array two times in the same memory: never contiguous, so that loops compile once."""
    return np.lib.stride_tricks.as_strided(x, (2, *x.shape), (0, *x.strides), writeable=False)


_NO_MASK = 0, *(_twice(np.zeros((1, 1, 1, 1), kind)) for kind in (np.bool_, np.float32))
_NO_DROPOUT = np.uint64(0), np.uint64(0), np.float32(1)


def _drop(inputs: Inputs) -> tuple[Any, Any, Any]:
    if inputs.dropout is None:
        return _NO_DROPOUT
    p = inputs.dropout.p
    seed, below = int(inputs.dropout.seed), threshold(p)
    return np.uint64(seed), np.uint64(below), np.float32(1.0 / (1.0 - p))


def _padded(size: int, to: int) -> int:
    return (size + to - 1) // to * to


def _room(key: str) -> tuple[Array, ...]:
    """Where rows are worked on: a row, the slabs of keys and of sums, what keys say of each column,
    lanes, exponents and the same as floats, what dropout keeps, the slab of values, another row."""
    if key not in _kept.rooms:
        if len(_kept.rooms) >= _MOST_ROOMS:
            _kept.rooms.clear()
        maps = maps_of(key, torch.device("cpu"))
        _kept.rooms[key] = _short_room(maps) if maps.tokens <= _SHORT else _new_room(maps)
    return _kept.rooms[key]


def _short_room(maps: Maps) -> tuple[Array, ...]:
    """The same for short sequences: a row, rows of sums, ids forth and back, lanes, exponents and the
    same as floats, what dropout keeps, another row."""
    row = _padded(maps.tokens, MANY_LANES) + LANES
    t, powers, keep, other = (np.zeros(row, np.float32) for _ in range(4))
    turns = np.zeros((shorts.TURNS, maps.buckets), np.float32)
    forth, back = (np.zeros(maps.tokens, np.uint32) for _ in range(2))
    lanes = np.zeros(MANY_LANES, np.float32)
    return t, turns, forth, back, lanes, powers.view(np.int32), powers, keep, other


def _new_room(maps: Maps) -> tuple[Array, ...]:
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
