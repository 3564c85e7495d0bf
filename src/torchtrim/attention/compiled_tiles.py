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
    add_column,
    add_slab,
    column_of,
    exponentials,
    inlined,
    jit,
    keep_row,
    largest,
    masked,
    slab_of,
    spread_column,
    spread_slab,
    sum_column,
    sum_slab,
)


@inlined
def biased_row(
    scores: Any, offset: int, n: int, i: int, k_lookup: Any, q_lookup: Any, room: Any, maps: Any
) -> None:
    """room.t = a query's scores with all that positions add to them."""
    geometry, group, seen, used = maps[0], maps[1], maps[4], maps[3]
    t, slab, column = room[0], room[1], room[3]
    wide, skip, length = geometry[1], geometry[2], geometry[3]
    query_only, key_only, both = geometry[5], geometry[6], geometry[7]
    has_k, has_q = k_lookup.size > 0, q_lookup.size > 0
    if i >= skip:
        y, x = (i - skip) // wide, (i - skip) % wide
        if has_k:
            slab_of(k_lookup[n, i], seen, used[y, 0], used[y, 1], x, wide, slab)
        add_slab(scores, offset, slab, group, y, geometry, t)
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
def sum_row(t: Any, n: int, i: int, sums: Any, slab: Any, maps: Any) -> None:
    """Add a row to the buckets of its query."""
    geometry, group, seen, used = maps[0], maps[1], maps[4], maps[3]
    wide, skip, length = geometry[1], geometry[2], geometry[3]
    row = sums[n, i]
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
def sum_back(t: Any, n: int, i: int, sums: Any, column: Any, maps: Any) -> None:
    """Add a row to the buckets of its keys; those of the grid wait in `column`."""
    geometry, group = maps[0], maps[1]
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
def mask_row(t: Any, n: int, i: int, allowed: Any, added: Any, length: int) -> None:
    """Apply the mask of a query, (B, H, L, L) or empty."""
    if allowed.size:
        heads = allowed.shape[1]
        masked(t, allowed[n // heads, n % heads, i], added[0, 0, 0], length)
    elif added.size:
        heads = added.shape[1]
        masked(t, allowed[0, 0, 0], added[n // heads, n % heads, i], length)


@inlined
def softmax_row(t: Any, length: int, room: Any) -> Any:
    """The softmax of t in place, and the logarithm of its sum."""
    count = (length + LANES - 1) // LANES * LANES
    many = (length + MANY_LANES - 1) // MANY_LANES * MANY_LANES
    t[length:many] = NOTHING
    top = largest(t, many, room[4])
    if top == NOTHING:
        for j in range(length):
            if t[j] != t[j]:
                top = t[j]
        if top == NOTHING:
            t[:length] = ZERO
            return EVERYTHING
    total = exponentials(t, count, top, room[5], room[6])
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
    k_lookup, q_lookup = lookups
    t, sums_slab, column = room[0], room[2], room[3]
    geometry, pattern, used = maps[0], maps[2], maps[3]
    lse, sums = results
    skip, length = geometry[2], geometry[3]
    for head in range(heads):
        n, now = first_head + head, -1
        for row in range(rows):
            i = token_of(first_row + row, geometry)
            x = (i - skip) % geometry[1]
            if q_lookup.size and i >= skip and x != now:
                column_of(q_lookup[n], pattern, used, x, geometry, column)
                now = x
            offset = (head * rows + row) * length
            biased_row(scores, offset, n, i, k_lookup, q_lookup, room, maps)
            mask_row(t, n, i, masks[0], masks[1], length)
            lse[n, i] = softmax_row(t, length, room)
            if drop[1] > 0:
                keep_row(drop[0], n * length + i, drop[1], drop[2], length, room[7])
                t[:length] *= room[7][:length]
            scores[offset : offset + length] = t[:length]
            if sums.size:
                sum_row(t, n, i, sums, sums_slab, maps)


@jit
def backward_tile(
    scores: Any,
    slopes: Any,
    place: Any,
    lookups: Any,
    masks: Any,
    drop: Any,
    room: Any,
    maps: Any,
    results: Any,
) -> None:
    """Scores become probabilities and slopes of probabilities become slopes of scores, in place."""
    first_head, heads, first_row, rows = place
    geometry, pattern, used = maps[0], maps[2], maps[3]
    skip, length = geometry[2], geometry[3]
    back_column, of_q_lookup = results[0], results[1]
    for head in range(heads):
        n, now = first_head + head, -1
        for row in range(rows):
            i = token_of(first_row + row, geometry)
            x = (i - skip) % geometry[1]
            if of_q_lookup.size and i >= skip and x != now:
                if now >= 0:
                    spread_column(back_column, pattern, used, now, geometry, of_q_lookup[n])
                column_of(lookups[1][n], pattern, used, x, geometry, room[3])
                now = x
            offset = (head * rows + row) * length
            weights_row(scores, offset, n, i, lookups, masks, room, maps, results)
            slopes_row(scores, slopes, offset, n, i, lookups, drop, room, maps, results)
        if now >= 0:
            spread_column(back_column, pattern, used, now, geometry, of_q_lookup[n])


@inlined
def weights_row(
    scores: Any,
    offset: int,
    n: int,
    i: int,
    lookups: Any,
    masks: Any,
    room: Any,
    maps: Any,
    results: Any,
) -> None:
    """room.t = the probabilities of a query again, without dropout."""
    t, length = room[0], maps[0][3]
    count = (length + LANES - 1) // LANES * LANES
    biased_row(scores, offset, n, i, lookups[0], lookups[1], room, maps)
    mask_row(t, n, i, masks[0], masks[1], length)
    t[length:count] = NOTHING
    exponentials(t, count, results[4][n, i], room[5], room[6])


@inlined
def slopes_row(
    scores: Any,
    slopes: Any,
    offset: int,
    n: int,
    i: int,
    lookups: Any,
    drop: Any,
    room: Any,
    maps: Any,
    results: Any,
) -> None:
    """Slopes of a query's scores from those of its probabilities, and their sums by bucket."""
    t, slab, sums_slab, keep = room[0], room[8], room[2], room[7]
    d = room[9]
    length = maps[0][3]
    of_k_lookup, of_q_lookup, sums = results[2], results[1], results[3]
    biased_slopes(slopes, offset, n, i, lookups[2], slab, d, maps)
    delta = results[5][n, i]
    if drop[1] > 0:
        keep_row(drop[0], n * length + i, drop[1], drop[2], length, keep)
        for j in range(length):
            d[j] = (d[j] * keep[j] - delta) * t[j]
            t[j] *= keep[j]
    else:
        for j in range(length):
            d[j] = (d[j] - delta) * t[j]
    for j in range(length):
        scores[offset + j] = t[j]
        slopes[offset + j] = d[j]
    if sums.size:
        sum_row(t, n, i, sums, sums_slab, maps)
    if of_k_lookup.size:
        sum_row(d, n, i, of_k_lookup, sums_slab, maps)
    if of_q_lookup.size:
        sum_back(d, n, i, of_q_lookup, results[0], maps)


@inlined
def biased_slopes(
    slopes: Any, offset: int, n: int, i: int, v_lookup: Any, slab: Any, d: Any, maps: Any
) -> None:
    """d = the slopes of a query's probabilities with what the values' table adds."""
    geometry, group, seen, used = maps[0], maps[1], maps[4], maps[3]
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
