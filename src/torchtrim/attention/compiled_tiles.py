"""Blocks of scores between torch's matrix products, compiled by numba.

Queries come column by column, so that what keys say of a column (`column_of`) is made once for all
its rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torchtrim.attention.compiled_rows import (
    EVERYTHING,
    LANES,
    MANY_LANES,
    NOTHING,
    ONE,
    ZERO,
    add,
    add_column,
    add_slab,
    allow,
    borrowed,
    column_of,
    exponentials,
    inlined,
    jit,
    keep_row,
    largest,
    slab_of,
    spread_column,
    spread_slab,
    sum_column,
    sum_slab,
)


@inlined
def biased_row(
    scores: Any, offset: int, n: int, i: int, lookups: Any, work: Any, column: Any, grid: Any
) -> None:
    """t = a query's scores with all that positions add to them; work is (t, slab)."""
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
    """What a row adds to the buckets of its query; before it, nothing."""
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
    """Add a row to the buckets of its keys; those of the grid wait in `column`."""
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
    """The token of a query when queries come column by column."""
    height, wide, skip = geometry[0], geometry[1], geometry[2]
    if row < skip:
        return row
    return skip + (row - skip) % height * wide + (row - skip) // height


@inlined
def mask_row(t: Any, n: int, i: int, kind: int, allowed: Any, added: Any, length: int) -> None:
    """Apply the mask of a query, (2, B, H, L, L) of which the first is looked at."""
    if kind == 1:
        allow(t, allowed[0, n // allowed.shape[2], n % allowed.shape[2], i], length)
    elif kind == 2:
        add(t, added[0, n // added.shape[2], n % added.shape[2], i], length)


@inlined
def softmax_row(t: Any, length: int, lanes: Any, exponents: Any, powers: Any) -> Any:
    """The softmax of t in place, and the logarithm of its sum."""
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
    """Turn a block of scores into probabilities, in place; note lse and sums by bucket."""
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
    """Scores become probabilities and slopes of probabilities become slopes of scores, in place."""
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
    """d = the slopes of scores from those of probabilities; t = the probabilities after dropout."""
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
    """d = the slopes of a query's probabilities with what the values' table adds; work is (d, slab)."""
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
