"""Loops that numba compiles: over a row of scores, and over a block of rows between matrix products.

`t` is a row, padded to whole chunks. Loops run over image rows with their width rounded up: excess writes are
overwritten by the next row, excess reads go to columns that are never read. Loops run over slices: a computed
index may be negative, the index of a slice may not, so LLVM can vectorize. Buckets are unsigned for the same
reason. The buckets of a query come from a reversed pattern: `backward[g, wide - 1 - x + xj]` is the bucket of
x and xj. Queries come column by column, so that the lookups of keys for a column (`column_of`) are gathered
once for all its rows.
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
CHUNK = 8  # Eight float32 fill a register of AVX2.
FEW_LANES, LANES, MANY_LANES = 8, 16, 64  # One register, two, and eight independent ones.
# Cephes' expf: ln 2 in two parts, and the coefficients of its polynomial.
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
"""An array of the caller without reference counting, which each slice in a loop would pay for."""


@jit
def slab_of(row: Any, pattern: Any, low: int, high: int, x: int, wide: int, slab: Any) -> None:
    """slab[g, xj] = the lookup's row for a key in column xj, for each pattern of rows."""
    for g in range(low, high):
        buckets, to = pattern[g, wide - 1 - x : 2 * wide - 1 - x], slab[g, :wide]
        for xj in range(wide):
            to[xj] = row[buckets[xj]]


@jit
def add_slab(
    scores: Any, offset: int, slab: Any, group: Any, y: int, geometry: Any, t: Any
) -> None:
    """t = scores + the slab, for each key of the grid."""
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
    """slab[g, xj] = sum of t over the keys of column xj in rows of pattern g."""
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
    """column[g, j] = the lookup of key j for a query in column x, for each pattern of rows."""
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
    """Add a column's sums to the buckets of each key, and set the column to zero."""
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
    """t += the keys' lookups for the query in row y."""
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
    """column += t, for the query in row y."""
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
    """Return the largest of the first `count` elements of t; `count` is a multiple of 64."""
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
    """t = exp(t - top), by Cephes' polynomial; return its sum. `powers` views `exponents` as floats."""
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
    """Set t to -inf where it is not allowed."""
    for j in range(length):
        t[j] = t[j] if allowed[j] else NOTHING


@jit
def add(t: Any, added: Any, length: int) -> None:
    """Add a row of a mask."""
    for j in range(length):
        t[j] += added[j]


@jit
def mixed(x: Any) -> Any:
    """Hash 32 bits; see `core.mixed`."""
    x = ((x ^ (x >> SHIFT)) * FIRST) & WORD
    x = ((x ^ (x >> OTHER_SHIFT)) * SECOND) & WORD
    return x ^ (x >> SHIFT)


@jit
def keep_row(seed: Any, row: int, below: Any, up: Any, length: int, keep: Any) -> None:
    """keep[j] = 0 or `up`; see `core.kept`."""
    start = mixed(mixed((np.uint64(row) & WORD) ^ (seed & WORD)) ^ (seed >> HALF_WORD))
    for j in range(length):
        bits = mixed((start + np.uint64(j) * STRIDE) & WORD)
        keep[j] = up if bits >= below else ZERO


@inlined
def biased_row(
    scores: Any, offset: int, n: int, i: int, lookups: Any, work: Any, column: Any, grid: Any
) -> None:
    """t = a query's scores plus its positions; work is (t, slab)."""
    k_lookup, q_lookup = lookups
    t, slab = work
    geometry, group, seen, used = grid
    wide, skip, length = geometry[1], geometry[2], geometry[3]
    query_only, key_only, both = geometry[5], geometry[6], geometry[7]
    has_k, has_q = k_lookup.size > 0, q_lookup.size > 0
    if i >= skip:
        y, x = (i - skip) // wide, (i - skip) % wide
        if has_k:
            slab_of(k_lookup[n, i], seen, used[y, 0], used[y, 1], x, wide, slab)
            add_slab(scores, offset, slab, group, y, geometry, t)
        else:
            t[skip:length] = scores[offset + skip : offset + length]
        if has_q:
            add_column(column, group, y, geometry, t)
        of_k, of_q = key_only, query_only
    else:
        for j in range(skip, length):
            t[j] = scores[offset + j]
            t[j] += k_lookup[n, i, query_only] if has_k else ZERO
            t[j] += q_lookup[n, j, key_only] if has_q else ZERO
        of_k, of_q = both, both
    for j in range(skip):
        t[j] = scores[offset + j]
        t[j] += k_lookup[n, i, of_k] if has_k else ZERO
        t[j] += q_lookup[n, j, of_q] if has_q else ZERO


@inlined
def sum_row(t: Any, n: int, i: int, sums: Any, slab: Any, grid: Any) -> None:
    """Set the buckets of a query to the sums of its row."""
    geometry, group, seen, used = grid
    wide, skip, length = geometry[1], geometry[2], geometry[3]
    row = sums[n, i]
    row[:] = ZERO
    if i >= skip:
        y, x = (i - skip) // wide, (i - skip) % wide
        sum_slab(t, group, y, geometry, used[y, 0], used[y, 1], slab)
        spread_slab(slab, seen, used[y, 0], used[y, 1], x, wide, row)
        first, rest = geometry[6], ZERO
    else:
        first, rest = geometry[7], ZERO
        for j in range(skip, length):
            rest += t[j]
        row[geometry[5]] += rest
    for j in range(skip):
        row[first] += t[j]


@inlined
def sum_back(t: Any, n: int, i: int, sums: Any, column: Any, grid: Any) -> None:
    """Add a row to the buckets of its keys; keys of the grid accumulate in `column` first."""
    geometry, group = grid[0], grid[1]
    wide, skip, length = geometry[1], geometry[2], geometry[3]
    if i >= skip:
        sum_column(t, group, (i - skip) // wide, geometry, column)
        first = geometry[5]
    else:
        first = geometry[7]
        for j in range(skip, length):
            sums[n, j, geometry[6]] += t[j]
    for j in range(skip):
        sums[n, j, first] += t[j]


@inlined
def token_of(row: int, geometry: Any) -> Any:
    """Return the token of a query when queries come column by column."""
    height, wide, skip = geometry[0], geometry[1], geometry[2]
    if row < skip:
        return row
    return skip + (row - skip) % height * wide + (row - skip) // height


@inlined
def mask_row(t: Any, n: int, i: int, kind: int, allowed: Any, added: Any, length: int) -> None:
    """Apply the mask of a query; masks are (2, B, H, L, L), and only the first copy is read."""
    if kind == 1:
        allow(t, allowed[0, n // allowed.shape[2], n % allowed.shape[2], i], length)
    elif kind == 2:
        add(t, added[0, n // added.shape[2], n % added.shape[2], i], length)


@inlined
def softmax_row(t: Any, length: int, lanes: Any, exponents: Any, powers: Any) -> Any:
    """Compute the softmax of t in place, and return its log-sum-exp."""
    count = (length + LANES - 1) // LANES * LANES
    many = (length + MANY_LANES - 1) // MANY_LANES * MANY_LANES
    t[length:many] = NOTHING
    top = largest(t, many, lanes)
    if top == NOTHING:
        for j in range(length):
            if t[j] != t[j]:
                top = t[j]
        if top == NOTHING:
            t[:length] = ZERO
            return EVERYTHING
    total = exponentials(t, count, top, exponents, powers)
    share = ONE / total
    for j in range(length):
        t[j] *= share
    return top + np.log(total)


@jit
def forward_tile(
    scores: Any, place: Any, lookups: Any, masks: Any, drop: Any, room: Any, maps: Any, results: Any
) -> None:
    """Turn a block of scores into probabilities, in place; write lse and the sums by bucket."""
    first_head, heads, first_row, rows = place
    k_lookup, q_lookup = borrowed(lookups[0]), borrowed(lookups[1])
    kind, allowed, added = masks[0], borrowed(masks[1]), borrowed(masks[2])
    t, slab, sums_slab = borrowed(room[0]), borrowed(room[1]), borrowed(room[2])
    column, lanes = borrowed(room[3]), borrowed(room[4])
    exponents, powers, keep = borrowed(room[5]), borrowed(room[6]), borrowed(room[7])
    geometry, group, pattern, used, seen = maps
    group, pattern, used, seen = borrowed(group), borrowed(pattern), borrowed(used), borrowed(seen)
    sums, lse, scores = borrowed(results[1]), borrowed(results[0]), borrowed(scores)
    grid = (geometry, group, seen, used)
    wide, skip, length = geometry[1], geometry[2], geometry[3]
    for head in range(heads):
        n, now = first_head + head, -1
        for row in range(rows):
            i = token_of(first_row + row, geometry)
            x = (i - skip) % wide
            if q_lookup.size and i >= skip and x != now:
                column_of(q_lookup[n], pattern, used, x, geometry, column)
                now = x
            offset = (head * rows + row) * length
            biased_row(scores, offset, n, i, (k_lookup, q_lookup), (t, slab), column, grid)
            mask_row(t, n, i, kind, allowed, added, length)
            lse[n, i] = softmax_row(t, length, lanes, exponents, powers)
            if drop[1] > 0:
                keep_row(drop[0], n * length + i, drop[1], drop[2], length, keep)
                t[:length] *= keep[:length]
            scores[offset : offset + length] = t[:length]
            if sums.size:
                sum_row(t, n, i, sums, sums_slab, grid)


@jit
def backward_tile(
    tiles: Any, place: Any, lookups: Any, masks: Any, drop: Any, room: Any, maps: Any, results: Any
) -> None:
    """Turn scores into probabilities, and gradients of probabilities into gradients of scores, in place."""
    first_head, heads, first_row, rows = place
    k_lookup, q_lookup = borrowed(lookups[0]), borrowed(lookups[1])
    v_lookup, scores, slopes = borrowed(lookups[2]), borrowed(tiles[0]), borrowed(tiles[1])
    kind, allowed, added = masks[0], borrowed(masks[1]), borrowed(masks[2])
    t, slab, sums_slab = borrowed(room[0]), borrowed(room[1]), borrowed(room[2])
    column, exponents, powers = borrowed(room[3]), borrowed(room[5]), borrowed(room[6])
    keep, v_slab, d = borrowed(room[7]), borrowed(room[8]), borrowed(room[9])
    geometry, group, pattern, used, seen = maps
    group, pattern, used, seen = borrowed(group), borrowed(pattern), borrowed(used), borrowed(seen)
    back, of_q_lookup, of_k_lookup, sums, lse, delta = results
    back, of_q_lookup, of_k_lookup = borrowed(back), borrowed(of_q_lookup), borrowed(of_k_lookup)
    sums, lse, delta = borrowed(sums), borrowed(lse), borrowed(delta)
    grid = (geometry, group, seen, used)
    wide, skip, length = geometry[1], geometry[2], geometry[3]
    count = (length + LANES - 1) // LANES * LANES
    for head in range(heads):
        n, now = first_head + head, -1
        if of_q_lookup.size and not first_row:
            of_q_lookup[n] = ZERO
        for row in range(rows):
            i = token_of(first_row + row, geometry)
            x = (i - skip) % wide
            if q_lookup.size and i >= skip and x != now:
                if now >= 0:
                    spread_column(back, pattern, used, now, geometry, of_q_lookup[n])
                column_of(q_lookup[n], pattern, used, x, geometry, column)
                now = x
            offset = (head * rows + row) * length
            biased_row(scores, offset, n, i, (k_lookup, q_lookup), (t, slab), column, grid)
            mask_row(t, n, i, kind, allowed, added, length)
            t[length:count] = NOTHING
            exponentials(t, count, lse[n, i], exponents, powers)
            biased_slopes(slopes, offset, n, i, v_lookup, (d, v_slab), grid)
            slopes_row(t, d, delta[n, i], n * length + i, length, drop, keep)
            scores[offset : offset + length] = t[:length]
            slopes[offset : offset + length] = d[:length]
            if sums.size:
                sum_row(t, n, i, sums, sums_slab, grid)
            if of_k_lookup.size:
                sum_row(d, n, i, of_k_lookup, sums_slab, grid)
            if of_q_lookup.size:
                sum_back(d, n, i, of_q_lookup, back, grid)
        if now >= 0:
            spread_column(back, pattern, used, now, geometry, of_q_lookup[n])


@inlined
def slopes_row(t: Any, d: Any, delta: Any, row: int, length: int, drop: Any, keep: Any) -> None:
    """d = gradients of scores, from gradients of probabilities; t = probabilities after dropout."""
    if drop[1] > 0:
        keep_row(drop[0], row, drop[1], drop[2], length, keep)
        for j in range(length):
            d[j] = (d[j] * keep[j] - delta) * t[j]
            t[j] *= keep[j]
    else:
        for j in range(length):
            d[j] = (d[j] - delta) * t[j]


@inlined
def biased_slopes(
    slopes: Any, offset: int, n: int, i: int, v_lookup: Any, work: Any, grid: Any
) -> None:
    """d = gradients of a query's probabilities, including the values' table; work is (d, slab)."""
    d, slab = work
    geometry, group, seen, used = grid
    wide, skip, length = geometry[1], geometry[2], geometry[3]
    if v_lookup.size == 0:
        d[:length] = slopes[offset : offset + length]
        return
    row = v_lookup[n, i]
    if i >= skip:
        y, x = (i - skip) // wide, (i - skip) % wide
        slab_of(row, seen, used[y, 0], used[y, 1], x, wide, slab)
        add_slab(slopes, offset, slab, group, y, geometry, d)
        first = row[geometry[6]] if skip else ZERO
    else:
        first = row[geometry[7]]
        for j in range(skip, length):
            d[j] = slopes[offset + j] + row[geometry[5]]
    for j in range(skip):
        d[j] = slopes[offset + j] + first
