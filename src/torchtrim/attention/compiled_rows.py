"""Loops over one row of scores, compiled by numba: what relative positions add and take.

`t` is a row that is padded to whole chunks. Loops run over image rows whose width is rounded up:
what they write too much is overwritten by the next row, what they read too much is added to columns
that nobody reads. They run over slices, since a computed index may be negative and an index of a
slice may not, which lets LLVM use vectors. Buckets are unsigned for the same reason. What queries see
comes from a reversed pattern: `backward[g, wide - 1 - x + xj]` is the bucket of x and xj.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

import numpy as np

from torchtrim.core.caches import compiler

F = TypeVar("F", bound=Callable[..., Any])
jit: Callable[[F], F] = compiler(
    nogil=True, fastmath={"reassoc", "contract", "nsz"}, error_model="numpy"
)
inlined: Callable[[F], F] = import_module("numba").njit(
    nogil=True,
    fastmath={"reassoc", "contract", "nsz"},
    error_model="numpy",
    inline="always",
)
CHUNK = 8  # Eight float32 are a register of AVX2.
FEW_LANES, LANES, MANY_LANES = 8, 16, 64
LOG2E, HALF, ONE, ZERO = (np.float32(x) for x in (1.44269504088896341, 0.5, 1.0, 0.0))
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
LOWEST = np.float32(-127 * 0.6931471805599453)
C5, C4, C3 = (np.float32(x) for x in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3))
C2, C1, C0 = (np.float32(x) for x in (4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1))
NOTHING, EVERYTHING = np.float32(-np.inf), np.float32(np.inf)
WORD, FIRST, SECOND, STRIDE = (
    np.uint64(x) for x in (0xFFFFFFFF, 0x7FEB352D, 0x846CA68B, 0x9E3779B9)
)
SHIFT, OTHER_SHIFT, HALF_WORD = np.uint64(16), np.uint64(15), np.uint64(32)


def _borrowed(typing: Any, array: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lent = context.make_array(signature.args[0])(context, builder, arguments[0])
        lent.meminfo = lent.meminfo.type(None)
        lent.parent = lent.parent.type(None)
        return lent._getvalue()

    return array(array), code


borrowed: Any = import_module("numba.extending").intrinsic(_borrowed)
"""An array of the caller, without counting references to it: slices in loops would count each."""


@jit
def slab_of(row: Any, pattern: Any, low: int, high: int, x: int, wide: int, slab: Any) -> None:
    """slab[g, xj]: what a lookup's row says of a key in column xj, for each pattern of rows."""
    for g in range(low, high):
        buckets, to = pattern[g, wide - 1 - x : 2 * wide - 1 - x], slab[g, :wide]
        for xj in range(wide):
            to[xj] = row[buckets[xj]]


@jit
def add_slab(
    scores: Any, offset: int, slab: Any, group: Any, y: int, geometry: Any, t: Any
) -> None:
    """t = scores + what the slab says of each key of the grid."""
    height, wide, skip, padded = geometry[0], geometry[1], geometry[2], geometry[4]
    groups = group[y : y + height]
    for yj in range(height):
        base = skip + yj * wide
        to, one = t[base : base + padded], scores[offset + base : offset + base + padded]
        other = slab[groups[height - 1 - yj]]
        for j in range(padded):
            to[j] = one[j] + other[j]


@jit
def sum_slab(t: Any, group: Any, y: int, geometry: Any, low: int, high: int, slab: Any) -> None:
    """slab[g, xj] = the sum of t over the keys of column xj in rows of pattern g."""
    height, wide, skip, padded = geometry[0], geometry[1], geometry[2], geometry[4]
    slab[low:high] = ZERO
    groups = group[y : y + height]
    for yj in range(height):
        base = skip + yj * wide
        one, to = t[base : base + padded], slab[groups[height - 1 - yj]]
        for j in range(padded):
            to[j] += one[j]


@jit
def spread_slab(slab: Any, pattern: Any, low: int, high: int, x: int, wide: int, row: Any) -> None:
    """Add a slab's sums to the buckets of a lookup's row."""
    for g in range(low, high):
        buckets, one = pattern[g, wide - 1 - x : 2 * wide - 1 - x], slab[g]
        last, total = buckets[0], ZERO
        for xj in range(wide):
            now = buckets[xj]
            if now != last:
                row[last] += total
                last, total = now, ZERO
            total += one[xj]
        row[last] += total


@jit
def column_of(lookup: Any, pattern: Any, used: Any, x: int, geometry: Any, column: Any) -> None:
    """column[g, j]: what key j says of a query in column x, for each pattern of rows."""
    height, wide, skip = geometry[0], geometry[1], geometry[2]
    for yj in range(height):
        base = skip + yj * wide
        rows = lookup[base : base + wide]
        for g in range(used[yj, 0], used[yj, 1]):
            buckets = pattern[g, wide - 1 - x : 2 * wide - 1 - x]
            to = column[g, yj * wide : yj * wide + wide]
            for xj in range(wide):
                to[xj] = rows[xj, buckets[xj]]


@jit
def spread_column(column: Any, pattern: Any, used: Any, x: int, geometry: Any, sums: Any) -> None:
    """Add a column's sums to the buckets of each key, and empty it."""
    height, wide, skip = geometry[0], geometry[1], geometry[2]
    for yj in range(height):
        base = skip + yj * wide
        rows = sums[base : base + wide]
        for g in range(used[yj, 0], used[yj, 1]):
            buckets = pattern[g, wide - 1 - x : 2 * wide - 1 - x]
            one = column[g, yj * wide : yj * wide + wide]
            for xj in range(wide):
                rows[xj, buckets[xj]] += one[xj]
            one[:] = ZERO


@jit
def add_column(column: Any, group: Any, y: int, geometry: Any, t: Any) -> None:
    """t += what keys say of the query in row y."""
    height, wide, skip = geometry[0], geometry[1], geometry[2]
    groups = group[height - 1 - y : 2 * height - 1 - y]
    yj = 0
    while yj < height:
        g, end = groups[yj], yj + 1
        while end < height and groups[end] == g:
            end += 1
        first, number = yj * wide, (end - yj) * wide
        to, one = t[skip + first : skip + first + number], column[g, first : first + number]
        for j in range(number):
            to[j] += one[j]
        yj = end


@jit
def sum_column(t: Any, group: Any, y: int, geometry: Any, column: Any) -> None:
    """column += t: what keys said of the query in row y."""
    height, wide, skip = geometry[0], geometry[1], geometry[2]
    groups = group[height - 1 - y : 2 * height - 1 - y]
    yj = 0
    while yj < height:
        g, end = groups[yj], yj + 1
        while end < height and groups[end] == g:
            end += 1
        first, number = yj * wide, (end - yj) * wide
        one, to = t[skip + first : skip + first + number], column[g, first : first + number]
        for j in range(number):
            to[j] += one[j]
        yj = end


@jit
def largest(t: Any, count: int, lanes: Any) -> Any:
    """The largest of the first `count` of t, a multiple of 64."""
    lanes[:] = NOTHING
    for j in range(0, count, MANY_LANES):
        chunk = t[j : j + MANY_LANES]
        for u in range(MANY_LANES):
            lanes[u] = chunk[u] if chunk[u] > lanes[u] else lanes[u]
    half = MANY_LANES // 2
    while half >= FEW_LANES:
        for u in range(half):
            lanes[u] = lanes[half + u] if lanes[half + u] > lanes[u] else lanes[u]
        half //= 2
    top = lanes[0]
    for u in range(1, FEW_LANES):
        top = lanes[u] if lanes[u] > top else top
    return top


@jit
def exponentials(t: Any, count: int, top: Any, exponents: Any, powers: Any) -> Any:
    """t = exp(t - top), and its sum. Cephes' polynomial; `powers` views `exponents` as floats."""
    for j in range(count):
        x = t[j] - top
        x = LOWEST if x < LOWEST else x
        n = np.floor(x * LOG2E + HALF)
        r = x - n * LN2_HIGH - n * LN2_LOW
        p = ((((C5 * r + C4) * r + C3) * r + C2) * r + C1) * r + C0
        t[j] = p * r * r + r + ONE
        exponents[j] = (np.int32(n) + np.int32(127)) << np.int32(23)
    total = ZERO
    for j in range(count):
        p = t[j] * powers[j]
        t[j] = p
        total += p
    return total


@jit
def allow(t: Any, allowed: Any, length: int) -> None:
    """Take out of t what is not allowed."""
    for j in range(length):
        t[j] = t[j] if allowed[j] else NOTHING


@jit
def add(t: Any, added: Any, length: int) -> None:
    """Add a row of a mask."""
    for j in range(length):
        t[j] += added[j]


@jit
def mixed(x: Any) -> Any:
    """See `dropout.mixed`."""
    x = ((x ^ (x >> SHIFT)) * FIRST) & WORD
    x = ((x ^ (x >> OTHER_SHIFT)) * SECOND) & WORD
    return x ^ (x >> SHIFT)


@jit
def keep_row(seed: Any, row: int, below: Any, up: Any, length: int, keep: Any) -> None:
    """keep[j] = 0 or `up`; see `dropout.kept`."""
    start = mixed(mixed((np.uint64(row) & WORD) ^ (seed & WORD)) ^ (seed >> HALF_WORD))
    for j in range(length):
        bits = mixed((start + np.uint64(j) * STRIDE) & WORD)
        keep[j] = up if bits >= below else ZERO
