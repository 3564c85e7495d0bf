"""Blocks of scores of short sequences, compiled by numba.

Where tokens are few, loops over image rows are too short to pay. Here the buckets of one query with
every key are written out once for all heads, and each head looks up by them and sums by them. Sums go
to four rows in turn, since adding to one place twice in a row stalls on the first.
"""

from __future__ import annotations

from typing import Any

from torchtrim.attention.compiled_rows import (
    LANES,
    NOTHING,
    ZERO,
    borrowed,
    exponentials,
    inlined,
    jit,
    keep_row,
)
from torchtrim.attention.compiled_tiles import mask_row, slopes_row, softmax_row

TURNS = 4


@jit
def buckets_of(i: int, maps: Any, number: int, forth: Any, back: Any) -> None:
    """forth[j]: the bucket of query i and key j; back[j]: that of j and i, in the lookup of all j."""
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
    """t = scores + what a lookup's row says of each key."""
    one = scores[offset : offset + length]
    for j in range(length):
        t[j] = one[j] + row[ids[j]]


@inlined
def added(row: Any, ids: Any, length: int, t: Any) -> None:
    """t += what a lookup says by ids."""
    for j in range(length):
        t[j] += row[ids[j]]


@jit
def summed(t: Any, ids: Any, length: int, turns: Any, row: Any) -> None:
    """row[b] = the sum of t where the id is b. `turns` (4, buckets) is zeros, before and after."""
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
    """t = scores + what positions add; ids are (forth, back), a lookup that is not there is empty."""
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
    """As `compiled_tiles.forward_tile`, with queries as they are."""
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
    """As `compiled_tiles.backward_tile`, with queries as they are."""
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
    """flat[id of j] += d[j]: no two j have the same."""
    for j in range(length):
        flat[ids[j]] += d[j]
