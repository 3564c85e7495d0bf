"""The path for CPUs with numba: torch's matrix products, and compiled loops between them.

For short sequences, loops over image rows are too short to pay off. There, the buckets of a query with every
key are computed once for all heads, which index by them. Sums alternate between four rows, because two
consecutive additions to the same address stall.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchtrim.attention import compiled_loops as loops
from torchtrim.attention.buckets import Maps, maps_of
from torchtrim.attention.compiled_loops import (
    CHUNK,
    LANES,
    MANY_LANES,
    NOTHING,
    ZERO,
    borrowed,
    exponentials,
    inlined,
    jit,
    keep_row,
    mask_row,
    slopes_row,
    softmax_row,
)
from torchtrim.attention.core import Gradients, Inputs, PathResult, blocks, threshold

TURNS = 4  # Consecutive additions to the same address stall; four alternating sums hide that.


@jit
def buckets_of(i: int, maps: Any, number: int, forth: Any, back: Any) -> None:
    """Set forth[j] to the bucket of query i and key j, back[j] to that of query j and key i, flattened."""
    geometry, group, pattern, _, seen = maps
    height, wide, skip, length = geometry[0], geometry[1], geometry[2], geometry[3]
    query_only, key_only, both = geometry[5], geometry[6], geometry[7]
    alone, other = (both, both) if i < skip else (key_only, query_only)
    for j in range(skip):
        forth[j], back[j] = alone, j * number + other
    if i < skip:
        for j in range(skip, length):
            forth[j], back[j] = query_only, j * number + key_only
        return
    y, x = (i - skip) // wide, (i - skip) % wide
    for yj in range(height):
        base = skip + yj * wide
        ahead = seen[group[y - yj + height - 1], wide - 1 - x : 2 * wide - 1 - x]
        behind = pattern[group[yj - y + height - 1], wide - 1 - x : 2 * wide - 1 - x]
        for xj in range(wide):
            forth[base + xj] = ahead[xj]
            back[base + xj] = (base + xj) * number + behind[xj]


@inlined
def looked_up(scores: Any, offset: int, row: Any, ids: Any, length: int, t: Any) -> None:
    """t = scores + the lookup's row, gathered by the bucket of each key."""
    one = scores[offset : offset + length]
    for j in range(length):
        t[j] = one[j] + row[ids[j]]


@inlined
def added(row: Any, ids: Any, length: int, t: Any) -> None:
    """t += the lookup gathered by ids."""
    for j in range(length):
        t[j] += row[ids[j]]


@jit
def summed(t: Any, ids: Any, length: int, turns: Any, row: Any) -> None:
    """row[b] = sum of t over keys with id b. `turns` (4, buckets) is zero before and after."""
    first, second, third, fourth = turns[0], turns[1], turns[2], turns[3]
    whole = length // TURNS * TURNS
    for j in range(0, whole, TURNS):
        first[ids[j]] += t[j]
        second[ids[j + 1]] += t[j + 1]
        third[ids[j + 2]] += t[j + 2]
        fourth[ids[j + 3]] += t[j + 3]
    for j in range(whole, length):
        first[ids[j]] += t[j]
    for b in range(len(row)):
        row[b] = (first[b] + second[b]) + (third[b] + fourth[b])
    first[:], second[:], third[:], fourth[:] = ZERO, ZERO, ZERO, ZERO


@inlined
def scored(scores: Any, offset: int, row: Any, flat: Any, ids: Any, length: int, t: Any) -> None:
    """t = scores + positions; ids are (forth, back), and a missing lookup is empty."""
    forth, back = ids
    if row.size:
        looked_up(scores, offset, row, forth, length, t)
    else:
        t[:length] = scores[offset : offset + length]
    if flat.size:
        added(flat, back, length, t)


@jit
def forward_short(
    scores: Any, place: Any, lookups: Any, masks: Any, drop: Any, room: Any, maps: Any, results: Any
) -> None:
    """Compute `compiled_loops.forward_tile` for queries in their original order."""
    first_head, heads, first_row, rows = place
    k_lookup, q_lookup = borrowed(lookups[0]), borrowed(lookups[1])
    kind, allowed, added = masks[0], borrowed(masks[1]), borrowed(masks[2])
    t, turns, forth, back = room[0], room[1], room[2], room[3]
    lanes, exponents, powers, keep = room[4], room[5], room[6], room[7]
    t, turns, forth, back = borrowed(t), borrowed(turns), borrowed(forth), borrowed(back)
    lanes, exponents, powers = borrowed(lanes), borrowed(exponents), borrowed(powers)
    lse, sums, scores, keep = borrowed(results[0]), borrowed(results[1]), borrowed(scores), keep
    length, number = maps[0][3], turns.shape[1]
    for i in range(first_row, first_row + rows):
        buckets_of(i, maps, number, forth, back)
        for head in range(heads):
            n, offset = first_head + head, (head * rows + i - first_row) * length
            row = k_lookup[n, i] if k_lookup.size else t[:0]
            flat = q_lookup[n] if q_lookup.size else t[:0]
            scored(scores, offset, row, flat, (forth, back), length, t)
            mask_row(t, n, i, kind, allowed, added, length)
            lse[n, i] = softmax_row(t, length, lanes, exponents, powers)
            if drop[1] > 0:
                keep_row(drop[0], n * length + i, drop[1], drop[2], length, keep)
                t[:length] *= keep[:length]
            scores[offset : offset + length] = t[:length]
            if sums.size:
                summed(t, forth, length, turns, sums[n, i])


@jit
def backward_short(
    tiles: Any, place: Any, lookups: Any, masks: Any, drop: Any, room: Any, maps: Any, results: Any
) -> None:
    """Compute `compiled_loops.backward_tile` for queries in their original order."""
    first_head, heads, first_row, rows = place
    k_lookup, q_lookup = borrowed(lookups[0]), borrowed(lookups[1])
    v_lookup, scores, slopes = borrowed(lookups[2]), borrowed(tiles[0]), borrowed(tiles[1])
    kind, allowed, added = masks[0], borrowed(masks[1]), borrowed(masks[2])
    t, turns, forth, back = room[0], room[1], room[2], room[3]
    t, turns, forth, back = borrowed(t), borrowed(turns), borrowed(forth), borrowed(back)
    exponents, powers, keep, d = room[5], borrowed(room[6]), borrowed(room[7]), borrowed(room[8])
    exponents, of_q_lookup = borrowed(exponents), borrowed(results[0])
    of_k_lookup, sums = borrowed(results[1]), borrowed(results[2])
    lse, delta = borrowed(results[3]), borrowed(results[4])
    length, number = maps[0][3], turns.shape[1]
    count = (length + LANES - 1) // LANES * LANES
    if of_q_lookup.size and first_row == 0:
        of_q_lookup[first_head : first_head + heads] = ZERO
    for i in range(first_row, first_row + rows):
        buckets_of(i, maps, number, forth, back)
        for head in range(heads):
            n, offset = first_head + head, (head * rows + i - first_row) * length
            row = k_lookup[n, i] if k_lookup.size else t[:0]
            flat = q_lookup[n] if q_lookup.size else t[:0]
            scored(scores, offset, row, flat, (forth, back), length, t)
            mask_row(t, n, i, kind, allowed, added, length)
            t[length:count] = NOTHING
            exponentials(t, count, lse[n, i], exponents, powers)
            row = v_lookup[n, i] if v_lookup.size else t[:0]
            scored(slopes, offset, row, t[:0], (forth, back), length, d)
            slopes_row(t, d, delta[n, i], n * length + i, length, drop, keep)
            scores[offset : offset + length] = t[:length]
            slopes[offset : offset + length] = d[:length]
            if sums.size:
                summed(t, forth, length, turns, sums[n, i])
            if of_k_lookup.size:
                summed(d, forth, length, turns, of_k_lookup[n, i])
            if of_q_lookup.size:
                scatter(d, back, length, of_q_lookup[n])


@jit
def scatter(d: Any, ids: Any, length: int, flat: Any) -> None:
    """flat[ids[j]] += d[j], for distinct ids."""
    for j in range(length):
        flat[ids[j]] += d[j]


_SCORES = 1 << 17  # 512 KiB of float32, which stay in a core's cache.
_SHORT = 100  # Up to this length it pays to compute all buckets of a query; see docs/attention.md.
_MOST_ROOMS = 64  # As many as _maps keeps: more shapes than a model has layers of different size.
_EMPTY, _NONE = np.empty((0, 0, 0), np.float32), np.empty((0, 0), np.float32)
Array = Any
Parts = tuple[tuple[slice, slice], ...]


def forward(inputs: Inputs, *, with_sums: bool) -> PathResult:
    """Compute the attention; see `core.Path`."""
    number, length, dim = inputs.q.shape
    order = _ColumnOrder(inputs.maps)
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
    buffer, flat = _buffer(parts, length)
    for rows, heads in parts:
        scores = _view(buffer, rows, heads, length)
        _product(_cut(q, heads, rows), _cut(keys, heads), inputs.scale, scores)
        tile = forward_short if short else loops.forward_tile
        tile(flat, _place(rows, heads), lookups, *rest, results)
        torch.bmm(scores, _cut(inputs.v, heads), out=_cut(out, heads, rows))
    return PathResult(order.back(out), lse, sums)


def backward(
    inputs: Inputs, grad: Tensor, lse: Tensor, delta: Tensor, v_lookup: Tensor | None
) -> Gradients:
    """Compute the gradients; see `core.Path`."""
    number, length, dim = inputs.q.shape
    order = _ColumnOrder(inputs.maps)
    q, grad = order(inputs.q), order(grad)
    keys, values = inputs.k.transpose(1, 2), inputs.v.transpose(1, 2)
    given = (inputs.k_lookup, inputs.q_lookup, v_lookup)
    of_k_lookup, of_q_lookup, sums = (_lookups(inputs) if x is not None else None for x in given)
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
    q_lookup = _array(inputs.q_lookup, flat=short)
    lookups = (_array(inputs.k_lookup), q_lookup, _array(v_lookup))
    parts = blocks(number, length, dim, _SCORES)
    (buffer, flat), (other, other_flat) = (_buffer(parts, length) for _ in range(2))
    totals = _KeyGradients(inputs, whole=parts[0][0] == slice(0, length) if parts else True)
    of_q = torch.empty_like(q)
    for rows, heads in parts:
        weights, slopes = (_view(one, rows, heads, length) for one in (buffer, other))
        own_q, own_grad = _cut(q, heads, rows), _cut(grad, heads, rows)
        _product(own_q, _cut(keys, heads), inputs.scale, weights)
        torch.bmm(own_grad, _cut(values, heads), out=slopes)
        tile = backward_short if short else loops.backward_tile
        tile((flat, other_flat), _place(rows, heads), lookups, *rest)
        _product(slopes, _cut(inputs.k, heads), inputs.scale, _cut(of_q, heads, rows))
        totals.add(heads, weights, slopes, own_grad, own_q)
    return Gradients(order.back(of_q), *totals.result(), of_k_lookup, of_q_lookup, sums)


def _product(x: Tensor, y: Tensor, scale: float, out: Tensor) -> None:
    """out = scale x y, ignoring the previous contents of out."""
    torch.baddbmm(out, x, y, beta=0, alpha=scale, out=out)


class _KeyGradients:
    """Gradients of keys and values: products of a block that has all queries, else sums of the blocks'
    transposed products."""

    def __init__(self, inputs: Inputs, *, whole: bool) -> None:
        self._scale, self._whole = inputs.scale, whole
        self._k, self._v = (
            torch.empty_like(x) if whole else x.new_zeros(len(x), x.shape[2], x.shape[1])
            for x in (inputs.k, inputs.v)
        )

    def add(self, heads: slice, weights: Tensor, slopes: Tensor, grad: Tensor, q: Tensor) -> None:
        """Add the sums over a block of queries."""
        if self._whole:
            torch.bmm(weights.transpose(1, 2), grad, out=_cut(self._v, heads))
            _product(slopes.transpose(1, 2), q, self._scale, _cut(self._k, heads))
        else:
            self._v[heads].baddbmm_(grad.transpose(1, 2), weights)
            self._k[heads].baddbmm_(q.transpose(1, 2), slopes, alpha=self._scale)

    def result(self) -> tuple[Tensor, Tensor]:
        k, v = self._k, self._v
        return (k, v) if self._whole else (k.mT.contiguous(), v.mT.contiguous())


class _ColumnOrder:
    """Reorders the tokens of long sequences column by column; skip tokens stay in front."""

    def __init__(self, maps: Maps) -> None:
        self._maps, self._straight = maps, maps.tokens <= _SHORT

    def __call__(self, x: Tensor) -> Tensor:
        return x if self._straight else self._turned(x, self._maps.height, self._maps.width)

    def back(self, x: Tensor) -> Tensor:
        """Restore the original order."""
        if self._straight:
            return x
        return self._turned(x, self._maps.width, self._maps.height).contiguous()

    def _turned(self, x: Tensor, first: int, second: int) -> Tensor:
        skip = self._maps.skip
        grid = x[:, skip:].reshape(len(x), first, second, x.shape[2])
        turned = grid.transpose(1, 2).reshape(len(x), first * second, x.shape[2])
        return torch.cat([x[:, :skip], turned], 1) if skip else turned


class _ThreadRooms(threading.local):
    """Work space for rows that a thread keeps from call to call."""

    def __init__(self) -> None:
        self.rooms: dict[str, tuple[Array, ...]] = {}


_kept = _ThreadRooms()


def _buffer(parts: Parts, length: int) -> tuple[Tensor, Array]:
    """Return a buffer for a block of scores, with room for loops that read past its end, and its array.

    Buffers that a thread keeps would count as memory of the program for ever.
    """
    rows, heads = parts[0] if parts else (slice(0, 0), slice(0, 0))
    buffer = torch.empty(rows.stop * heads.stop * length + 2 * LANES, device="cpu")
    return buffer, buffer.numpy()


def _cut(x: Tensor, heads: slice, rows: slice | None = None) -> Tensor:
    """Return the rows of some heads, or the tensor itself if they are all of its heads."""
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
    """Return the mask kind (0 none, 1 boolean, 2 additive) and the arrays of both kinds."""
    mask = inputs.mask
    if mask is None:
        return _NO_MASK
    if mask.dtype == torch.bool:
        return 1, _twice(mask.numpy()), _NO_MASK[2]
    return 2, _NO_MASK[1], _twice(mask.float().numpy())


def _twice(x: Array) -> Array:
    """Return a view with two copies of the array: never contiguous, so that loops compile only once."""
    return np.lib.stride_tricks.as_strided(x, (2, *x.shape), (0, *x.strides), writeable=False)


_NO_MASK = 0, *(_twice(np.zeros((1, 1, 1, 1), kind)) for kind in (np.bool_, np.float32))
_NO_DROPOUT = np.uint64(0), np.uint64(0), np.float32(1)


def _drop(inputs: Inputs) -> tuple[Any, Any, Any]:
    if inputs.dropout is None:
        return _NO_DROPOUT
    p, seed = inputs.dropout
    return np.uint64(int(seed)), np.uint64(threshold(p)), np.float32(1.0 / (1.0 - p))


def _padded(size: int, to: int) -> int:
    return (size + to - 1) // to * to


def _room(key: str) -> tuple[Array, ...]:
    """Return the work space for rows: a row, the slabs of keys and of sums, the keys' lookups by column,
    lanes, exponents and their view as floats, the dropout mask, the slab of values, another row."""
    if key not in _kept.rooms:
        if len(_kept.rooms) >= _MOST_ROOMS:
            _kept.rooms.clear()
        maps = maps_of(key, torch.device("cpu"))
        _kept.rooms[key] = _short_room(maps) if maps.tokens <= _SHORT else _new_room(maps)
    return _kept.rooms[key]


def _short_room(maps: Maps) -> tuple[Array, ...]:
    """Return the work space for short sequences: a row, rows of sums, ids forth and back, lanes, exponents
    and their view as floats, the dropout mask, another row."""
    row = _padded(maps.tokens, MANY_LANES) + LANES
    t, powers, keep, other = (np.zeros(row, np.float32) for _ in range(4))
    turns = np.zeros((TURNS, maps.buckets), np.float32)
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
    """Return the sizes of the grid, groups, patterns, the groups of each row, and reversed patterns."""
    maps = maps_of(key, torch.device("cpu"))
    group, pattern = maps.group.numpy().view(np.uint32), maps.pattern.numpy().view(np.uint32)
    seen = [group[y : y + maps.height] for y in range(maps.height)]
    used = np.array([(one.min(), one.max() + 1) for one in seen], np.int64)
    padded = _padded(maps.width, CHUNK)
    geometry = (maps.height, maps.width, maps.skip, maps.tokens, padded, *maps.extra)
    return geometry, group, pattern, used, np.ascontiguousarray(pattern[:, ::-1])
