"""Kernels of relative attention: one program for each image row of queries, or of keys.

Nothing is added atomically: a program owns the rows that it writes.
"""
# fmt: off

from __future__ import annotations

from typing import Any

from torchtrim.attention.triton_tiles import (
    add_both,
    add_by_bucket,
    constexpr,
    kept,
    load_rows,
    looked_up,
    pair_code,
    pair_ids,
    row_tokens,
    store_rows,
    tl,
    triton,
    with_mask,
    without_dropped,
)


@triton.jit  # type: ignore[untyped-decorator]
def forward(
    q: Any, k: Any, v: Any, tk: Any, tq: Any, mask: Any, seed: Any, out: Any, lse: Any, sums: Any,
    group: Any, pattern: Any, windows: Any, strides_b: Any, strides_h: Any, stride_i: Any, stride_j:
    Any, scale: Any, below: Any, up: Any, heads: Any, length: Any, height: Any, width: Any, skip:
    Any, groups: Any, buckets: Any, rows: Any, parts: Any, dim: Any, v_dim: Any, size: constexpr, dims:
    constexpr, v_dims: constexpr, bins: constexpr, has_k: constexpr, has_q: constexpr, has_v:
    constexpr, mask_kind: constexpr, drops: constexpr,
) -> None:
    """Softmax by rows of keys (Milakov and Gimelshein's running maximum), sums by bucket beside."""
    n = tl.program_id(1).to(tl.int64)
    yi, xi, i, mi = row_tokens(tl.program_id(0), rows, height, width, skip, size)
    mask += (n // heads) * strides_b + (n % heads) * strides_h
    own = load_rows(q + n * length * dim, i, mi, dim, dims)
    top = tl.full([size], float("-inf"), tl.float32)
    total, acc = tl.zeros([size], tl.float32), tl.zeros([size, v_dims], tl.float32)
    said, waiting = tl.zeros([size, size], tl.float32), tl.zeros([size, size], tl.float32)
    ids, added = tl.zeros([size, size], tl.int32), tl.zeros([size, bins], tl.float32)
    mine = load_rows(tk + n * length * buckets, i, mi, buckets, bins) if has_k else added
    last = tl.program_id(0) * 0 + parts * (groups + 3)
    for turn in range(0, rows * parts):
        yj, xj, j, mj = row_tokens(turn, rows, height, width, skip, size)
        both = mi[:, None] & mj[None, :]
        code = pair_code(yi, yj, group, height, groups)
        if code + turn // rows * (groups + 3) != last:
            if has_v:
                added = add_by_bucket(added, waiting, ids, last % (groups + 3), windows, bins)
                waiting = tl.zeros([size, size], tl.float32)
            ids = pair_ids(code, xi, xj, mi, mj, pattern, windows, width, groups)
            if has_k:
                said = tl.gather(mine, ids, 1)
            last = code + turn // rows * (groups + 3)
        keys = load_rows(k + n * length * dim, j, mj, dim, dims)
        s = tl.dot(own, tl.trans(keys), input_precision="ieee") * scale + said
        if has_q:
            code = pair_code(yj, yi, group, height, groups)
            turned = tl.trans(pair_ids(code, xj, xi, mj, mi, pattern, windows, width, groups))
            s += looked_up(tq + n * length * buckets, j[None, :], both, turned, buckets)
        s = with_mask(s, i[:, None], j[None, :], both, mask, stride_i, stride_j, mask_kind)
        new = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        shrink, p = tl.exp(top - base), tl.exp(s - base[:, None])
        total, top = total * shrink + tl.sum(p, 1), new
        if drops:
            p *= kept(seed, n * length + i[:, None], j[None, :], below, up)
        values = load_rows(v + n * length * v_dim, j, mj, v_dim, v_dims)
        acc *= shrink[:, None]
        acc += tl.dot(p.to(v.dtype.element_ty), values, input_precision="ieee")
        if has_v:
            waiting, added = waiting * shrink[:, None] + p, added * shrink[:, None]
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    store_rows(out + n * length * v_dim, acc * share[:, None], i, mi, v_dim, v_dims)
    found = tl.where(total == 0.0, float("inf"), top + tl.log(tl.where(total == 0.0, 1.0, total)))
    tl.store(lse + n * length + i, found, mask=mi)
    if has_v:
        added = add_by_bucket(added, waiting, ids, last % (groups + 3), windows, bins)
        store_rows(sums + n * length * buckets, added * share[:, None], i, mi, buckets, bins)


@triton.jit  # type: ignore[untyped-decorator]
def backward_of_queries(
    q: Any, k: Any, v: Any, tk: Any, tq: Any, tv: Any, mask: Any, seed: Any, grad: Any, lse: Any,
    delta: Any, of_q: Any, of_tk: Any, sums: Any, group: Any, pattern: Any, windows: Any, strides_b:
    Any, strides_h: Any, stride_i: Any, stride_j: Any, scale: Any, below: Any, up: Any, heads: Any,
    length: Any, height: Any, width: Any, skip: Any, groups: Any, buckets: Any, rows: Any, parts: Any, dim:
    Any, v_dim: Any, size: constexpr, dims: constexpr, v_dims: constexpr, bins: constexpr, has_k:
    constexpr, has_q: constexpr, has_v: constexpr, mask_kind: constexpr, drops: constexpr,
) -> None:
    """Gradients of queries and of their lookups, and probabilities by bucket again."""
    n = tl.program_id(1).to(tl.int64)
    yi, xi, i, mi = row_tokens(tl.program_id(0), rows, height, width, skip, size)
    mask += (n // heads) * strides_b + (n % heads) * strides_h
    own = load_rows(q + n * length * dim, i, mi, dim, dims)
    slope = load_rows(grad + n * length * v_dim, i, mi, v_dim, v_dims)
    ends = tl.load(lse + n * length + i, mask=mi, other=float("inf"))
    whole = tl.load(delta + n * length + i, mask=mi, other=0.0)
    acc = tl.zeros([size, dims], tl.float32)
    said, ids = tl.zeros([size, size], tl.float32), tl.zeros([size, size], tl.int32)
    worth, p_waiting, s_waiting = said, said, said
    p_added, s_added = tl.zeros([size, bins], tl.float32), tl.zeros([size, bins], tl.float32)
    first, token = n * length * buckets, n * length + i[:, None]
    mine = load_rows(tk + first, i, mi, buckets, bins) if has_k else p_added
    valued = load_rows(tv + first, i, mi, buckets, bins) if has_v else p_added
    last = tl.program_id(0) * 0 + parts * (groups + 3)
    for turn in range(0, rows * parts):
        yj, xj, j, mj = row_tokens(turn, rows, height, width, skip, size)
        both, code = mi[:, None] & mj[None, :], pair_code(yi, yj, group, height, groups)
        if code + turn // rows * (groups + 3) != last:
            last %= groups + 3
            p_added, s_added = add_both(
                p_added, s_added, p_waiting, s_waiting, ids, last, windows, bins, has_v, has_k
            )
            p_waiting, s_waiting = p_waiting * 0.0, s_waiting * 0.0
            ids = pair_ids(code, xi, xj, mi, mj, pattern, windows, width, groups)
            said = tl.gather(mine, ids, 1) if has_k else said
            worth = tl.gather(valued, ids, 1) if has_v else worth
            last = code + turn // rows * (groups + 3)
        keys = load_rows(k + n * length * dim, j, mj, dim, dims)
        s = tl.dot(own, tl.trans(keys), input_precision="ieee") * scale + said
        if has_q:
            code = pair_code(yj, yi, group, height, groups)
            turned = tl.trans(pair_ids(code, xj, xi, mj, mi, pattern, windows, width, groups))
            s += looked_up(tq + first, j[None, :], both, turned, buckets)
        s = with_mask(s, i[:, None], j[None, :], both, mask, stride_i, stride_j, mask_kind)
        p = tl.exp(s - ends[:, None])
        values = load_rows(v + n * length * v_dim, j, mj, v_dim, v_dims)
        d = tl.dot(slope, tl.trans(values), input_precision="ieee") + worth
        dropped, d = without_dropped(p, d, seed, token, j[None, :], below, up, drops)
        d = (d - whole[:, None]) * p
        acc += tl.dot(d.to(k.dtype.element_ty), keys, input_precision="ieee")
        p_waiting, s_waiting = p_waiting + dropped, s_waiting + d
    store_rows(of_q + n * length * dim, acc * scale, i, mi, dim, dims)
    p_added, s_added = add_both(
        p_added, s_added, p_waiting, s_waiting, ids, last % (groups + 3), windows, bins, has_v, has_k
    )
    if has_v:
        store_rows(sums + n * length * buckets, p_added, i, mi, buckets, bins)
    if has_k:
        store_rows(of_tk + n * length * buckets, s_added, i, mi, buckets, bins)


@triton.jit  # type: ignore[untyped-decorator]
def backward_of_keys(
    q: Any, k: Any, v: Any, tk: Any, tq: Any, tv: Any, mask: Any, seed: Any, grad: Any, lse: Any,
    delta: Any, of_k: Any, of_v: Any, of_tq: Any, group: Any, pattern: Any, windows: Any, strides_b:
    Any, strides_h: Any, stride_i: Any, stride_j: Any, scale: Any, below: Any, up: Any, heads: Any,
    length: Any, height: Any, width: Any, skip: Any, groups: Any, buckets: Any, rows: Any, parts: Any, dim:
    Any, v_dim: Any, size: constexpr, dims: constexpr, v_dims: constexpr, bins: constexpr, has_k:
    constexpr, has_q: constexpr, has_v: constexpr, mask_kind: constexpr, drops: constexpr,
) -> None:
    """Gradients of keys, of their lookups, and of values. Tiles are (keys, queries)."""
    n = tl.program_id(1).to(tl.int64)
    yj, xj, j, mj = row_tokens(tl.program_id(0), rows, height, width, skip, size)
    mask += (n // heads) * strides_b + (n % heads) * strides_h
    own = load_rows(k + n * length * dim, j, mj, dim, dims)
    values = load_rows(v + n * length * v_dim, j, mj, v_dim, v_dims)
    of_own = tl.zeros([size, dims], tl.float32)
    of_values = tl.zeros([size, v_dims], tl.float32)
    said, waiting = tl.zeros([size, size], tl.float32), tl.zeros([size, size], tl.float32)
    ids, added = tl.zeros([size, size], tl.int32), tl.zeros([size, bins], tl.float32)
    mine = load_rows(tq + n * length * buckets, j, mj, buckets, bins) if has_q else added
    last = tl.program_id(0) * 0 + parts * (groups + 3)
    for turn in range(0, rows * parts):
        yi, xi, i, mi = row_tokens(turn, rows, height, width, skip, size)
        both = mj[:, None] & mi[None, :]
        code = pair_code(yj, yi, group, height, groups)
        code += turn // rows * (groups + 3)
        if has_q and code != last:
            added = add_by_bucket(added, waiting, ids, last % (groups + 3), windows, bins)
            waiting *= 0.0
            ids = pair_ids(code % (groups + 3), xj, xi, mj, mi, pattern, windows, width, groups)
            said, last = tl.gather(mine, ids, 1), code
        asks = load_rows(q + n * length * dim, i, mi, dim, dims)
        slope = load_rows(grad + n * length * v_dim, i, mi, v_dim, v_dims)
        s = tl.dot(own, tl.trans(asks), input_precision="ieee") * scale + said
        d = tl.dot(values, tl.trans(slope), input_precision="ieee")
        forth = pair_code(yi, yj, group, height, groups)
        if has_k or has_v:
            turned = tl.trans(pair_ids(forth, xi, xj, mi, mj, pattern, windows, width, groups))
            first = n * length * buckets
            s = s + looked_up(tk + first, i[None, :], both, turned, buckets) if has_k else s
            d = d + looked_up(tv + first, i[None, :], both, turned, buckets) if has_v else d
        s = with_mask(s, i[None, :], j[:, None], both, mask, stride_i, stride_j, mask_kind)
        ends = tl.load(lse + n * length + i, mask=mi, other=float("inf"))
        whole = tl.load(delta + n * length + i, mask=mi, other=0.0)
        p = tl.exp(s - ends[None, :])
        row = n * length + i[None, :]
        dropped, d = without_dropped(p, d, seed, row, j[:, None], below, up, drops)
        d = (d - whole[None, :]) * p
        of_values += tl.dot(dropped.to(v.dtype.element_ty), slope, input_precision="ieee")
        of_own += tl.dot(d.to(q.dtype.element_ty), asks, input_precision="ieee")
        waiting += d
    store_rows(of_k + n * length * dim, of_own * scale, j, mj, dim, dims)
    store_rows(of_v + n * length * v_dim, of_values, j, mj, v_dim, v_dims)
    if has_q:
        added = add_by_bucket(added, waiting, ids, last % (groups + 3), windows, bins)
        store_rows(of_tq + n * length * buckets, added, j, mj, buckets, bins)
