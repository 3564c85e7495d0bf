"""The path for GPUs with Triton, and for its interpreter on a CPU: one program per image row.

Each program owns the rows it writes, without atomic additions. A tile has the queries of an image
row, or of a part of it, and the keys of another. It has a single row bucket, so the program gathers lookups
and writes sums only when that bucket changes. Skip tokens form a separate row in front of the image.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from torchtrim.attention.buckets import Maps, maps_of
from torchtrim.attention.core import Gradients, Inputs, PathResult, threshold

# fmt: off
jit: Callable[[Any], Any] = import_module("triton").jit
tl: Any = import_module("triton.language")
constexpr = Any


@jit
def row_tokens(number: Any, rows: Any, height: Any, width: Any, skip: Any, size: constexpr) -> Any:
    """Return the image row (-1 for skip tokens), columns, tokens and a mask of existing tokens.

    `number` counts all rows of the first part of the columns, then all rows of the next part.
    """
    y = number % rows - (rows - height)
    x = number // rows * size + tl.arange(0, size)
    count = tl.where(y < 0, skip, width)
    token = tl.where(y < 0, x, skip + y * width + x)
    return y, x, token, x < count


@jit
def pair_code(yi: Any, yj: Any, group: Any, height: Any, groups: Any) -> Any:
    """Return the pattern of two image rows, or a code above all patterns if one has skip tokens."""
    inside = (yi >= 0) & (yj >= 0)
    found = tl.load(group + yi - yj + height - 1, mask=inside, other=0)
    special = tl.where(yj >= 0, 0, tl.where(yi >= 0, 1, 2))
    return tl.where(inside, found, groups + special)


@jit
def pair_ids(
    code: Any,
    xi: Any,
    xj: Any,
    mi: Any,
    mj: Any,
    pattern: Any,
    windows: Any,
    width: Any,
    groups: Any,
) -> Any:
    """Return the bucket of every pair of tokens of two rows, (size, size)."""
    inside = mi[:, None] & mj[None, :]
    place = tl.minimum(code, groups - 1) * (2 * width - 1) + xi[:, None] - xj[None, :] + width - 1
    found = tl.load(pattern + place, mask=inside, other=0)
    return tl.where(code < groups, found, tl.load(windows + 2 * code))


@jit
def add_by_bucket(
    sums: Any, waiting: Any, ids: Any, code: Any, windows: Any, size: constexpr
) -> Any:
    """Add each row of `waiting` to the buckets of its columns, one bucket at a time."""
    buckets = tl.arange(0, size)
    for bucket in range(tl.load(windows + 2 * code), tl.load(windows + 2 * code + 1)):
        total = tl.sum(tl.where(ids == bucket, waiting, 0.0), 1)
        sums += tl.where((buckets == bucket)[None, :], total[:, None], 0.0)
    return sums


@jit
def load_rows(start: Any, token: Any, exists: Any, width: Any, size: constexpr) -> Any:
    """Load rows of a (L, width) tensor, padded with zeros to `size` columns."""
    column = tl.arange(0, size)
    inside = exists[:, None] & (column < width)[None, :]
    return tl.load(start + token[:, None] * width + column[None, :], mask=inside, other=0.0)


@jit
def store_rows(
    start: Any, value: Any, token: Any, exists: Any, width: Any, size: constexpr
) -> None:
    """Store rows of a (L, width) tensor."""
    column = tl.arange(0, size)
    inside = exists[:, None] & (column < width)[None, :]
    to = start + token[:, None] * width + column[None, :]
    tl.store(to, value.to(start.dtype.element_ty), mask=inside)


@jit
def looked_up(start: Any, rows: Any, exists: Any, ids: Any, buckets: Any) -> Any:
    """Gather the lookup of one token for each pair; `rows` and `exists` are (size, size)."""
    return tl.load(start + rows * buckets + ids, mask=exists, other=0.0)


@jit
def with_mask(
    scores: Any,
    i: Any,
    j: Any,
    exists: Any,
    mask: Any,
    stride_i: Any,
    stride_j: Any,
    kind: constexpr,
) -> Any:
    """Apply the mask to scores: kind 0 is none, 1 boolean, 2 additive."""
    place = i * stride_i + j * stride_j
    if kind == 1:
        allowed = tl.load(mask + place, mask=exists, other=0)
        scores = tl.where(allowed != 0, scores, float("-inf"))
    if kind == 2:
        scores += tl.load(mask + place, mask=exists, other=0.0).to(tl.float32)
    return tl.where(exists, scores, float("-inf"))


@jit
def mixed(x: Any) -> Any:
    """Hash 32 bits; see `core.mixed`."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@jit
def kept(seed: Any, row: Any, j: Any, below: Any, up: Any) -> Any:
    """Return 0 or `up` for each pair; see `core.kept`."""
    number = tl.load(seed)
    low = (number & 0xFFFFFFFF).to(tl.uint32)
    high = ((number >> 32) & 0xFFFFFFFF).to(tl.uint32)
    start = mixed(mixed((row & 0xFFFFFFFF).to(tl.uint32) ^ low) ^ high)
    bits = mixed(start + j.to(tl.uint32) * 0x9E3779B9)
    return tl.where(bits.to(tl.int64) >= below, up, 0.0)


@jit
def without_dropped(
    p: Any, d: Any, seed: Any, row: Any, j: Any, below: Any, up: Any, drops: constexpr
) -> Any:
    """Apply dropout to probabilities and their gradients."""
    dropped = p
    if drops:
        keep = kept(seed, row, j, below, up)
        d, dropped = d * keep, p * keep
    return dropped, d


@jit
def add_both(
    first: Any,
    second: Any,
    first_waiting: Any,
    second_waiting: Any,
    ids: Any,
    code: Any,
    windows: Any,
    size: constexpr,
    has_first: constexpr,
    has_second: constexpr,
) -> Any:
    """Call `add_by_bucket` for the requested sums."""
    if has_first:
        first = add_by_bucket(first, first_waiting, ids, code, windows, size)
    if has_second:
        second = add_by_bucket(second, second_waiting, ids, code, windows, size)
    return first, second


@jit
def forward_rows(
    q: Any, k: Any, v: Any, tk: Any, tq: Any, mask: Any, seed: Any, out: Any, lse: Any, sums: Any,
    group: Any, pattern: Any, windows: Any, strides_b: Any, strides_h: Any, stride_i: Any, stride_j:
    Any, scale: Any, below: Any, up: Any, heads: Any, length: Any, height: Any, width: Any, skip:
    Any, groups: Any, buckets: Any, rows: Any, parts: Any, dim: Any, v_dim: Any, size: constexpr, dims:
    constexpr, v_dims: constexpr, bins: constexpr, has_k: constexpr, has_q: constexpr, has_v:
    constexpr, mask_kind: constexpr, drops: constexpr,
) -> None:
    """Compute online softmax over rows of keys (Milakov and Gimelshein), and sums by bucket."""
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


@jit
def backward_of_queries(
    q: Any, k: Any, v: Any, tk: Any, tq: Any, tv: Any, mask: Any, seed: Any, grad: Any, lse: Any,
    delta: Any, of_q: Any, of_tk: Any, sums: Any, group: Any, pattern: Any, windows: Any, strides_b:
    Any, strides_h: Any, stride_i: Any, stride_j: Any, scale: Any, below: Any, up: Any, heads: Any,
    length: Any, height: Any, width: Any, skip: Any, groups: Any, buckets: Any, rows: Any, parts: Any, dim:
    Any, v_dim: Any, size: constexpr, dims: constexpr, v_dims: constexpr, bins: constexpr, has_k:
    constexpr, has_q: constexpr, has_v: constexpr, mask_kind: constexpr, drops: constexpr,
) -> None:
    """Compute the gradients of queries and their lookups, and again the probabilities by bucket."""
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


@jit
def backward_of_keys(
    q: Any, k: Any, v: Any, tk: Any, tq: Any, tv: Any, mask: Any, seed: Any, grad: Any, lse: Any,
    delta: Any, of_k: Any, of_v: Any, of_tq: Any, group: Any, pattern: Any, windows: Any, strides_b:
    Any, strides_h: Any, stride_i: Any, stride_j: Any, scale: Any, below: Any, up: Any, heads: Any,
    length: Any, height: Any, width: Any, skip: Any, groups: Any, buckets: Any, rows: Any, parts: Any, dim:
    Any, v_dim: Any, size: constexpr, dims: constexpr, v_dims: constexpr, bins: constexpr, has_k:
    constexpr, has_q: constexpr, has_v: constexpr, mask_kind: constexpr, drops: constexpr,
) -> None:
    """Compute the gradients of keys, their lookups, and values. Tiles are (keys, queries)."""
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
# fmt: on


# `tl.dot` needs at least 16; 64 is arbitrary.
_SMALLEST, _WIDEST = 16, 64


def forward(inputs: Inputs, *, with_sums: bool) -> PathResult:
    """Compute the attention; see `core.Path`."""
    q, k, v = inputs.q, inputs.k, inputs.v
    out, lse = torch.empty_like(v), q.new_empty(q.shape[:2], dtype=torch.float32)
    sums = _zeros(inputs) if with_sums else None
    mask, options = _options(inputs)
    given = (q, k, v, *_present(inputs.k_lookup, inputs.q_lookup, like=lse), mask)
    if q.numel():
        forward_rows[_grid(inputs)](
            *given, _seed(inputs), out, lse, *_present(sums, like=lse), **options, has_v=with_sums
        )
    return PathResult(out, lse, sums)


def backward(
    inputs: Inputs, grad: Tensor, lse: Tensor, delta: Tensor, v_lookup: Tensor | None
) -> Gradients:
    """Compute the gradients; see `core.Path`."""
    q, k, v = inputs.q, inputs.k, inputs.v
    of_q, of_k, of_v = (torch.empty(x.shape, device=x.device) for x in (q, k, v))
    asked = (inputs.k_lookup, inputs.q_lookup, v_lookup)
    of_k_lookup, of_q_lookup, sums = (_zeros(inputs) if x is not None else None for x in asked)
    mask, options = _options(inputs)
    options["has_v"] = v_lookup is not None
    delta = delta.contiguous()
    given = (q, k, v, *_present(*asked, like=lse), mask, _seed(inputs), grad, lse, delta)
    if q.numel():
        backward_of_queries[_grid(inputs)](
            *given, of_q, *_present(of_k_lookup, sums, like=lse), **options
        )
        backward_of_keys[_grid(inputs)](
            *given, of_k, of_v, *_present(of_q_lookup, like=lse), **options
        )
    return Gradients(of_q, of_k, of_v, of_k_lookup, of_q_lookup, sums)


def _grid(inputs: Inputs) -> tuple[int, int]:
    maps = inputs.maps
    rows = maps.height + (maps.skip > 0)
    return rows * _parts(maps), len(inputs.q)


def _size(maps: Maps) -> int:
    return min(_WIDEST, _power(max(maps.width, maps.skip)))


def _parts(maps: Maps) -> int:
    return -(-max(maps.width, maps.skip) // _size(maps))


def _power(number: int) -> int:
    return max(_SMALLEST, 1 << (number - 1).bit_length())


def _options(inputs: Inputs) -> tuple[Tensor, dict[str, Any]]:
    maps, mask = inputs.maps, inputs.mask
    kind = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
    shown = inputs.q.new_zeros(1) if mask is None else mask
    shown = shown.view(torch.uint8) if kind == 1 else shown
    strides = mask.stride() if mask is not None else (0, 0, 0, 0)
    names = ("strides_b", "strides_h", "stride_i", "stride_j")
    p = inputs.dropout.p if inputs.dropout else 0.0
    return shown, {
        **dict(zip(names, strides, strict=True)),
        "group": maps.group,
        "pattern": maps.pattern,
        "windows": _windows(maps.key, inputs.q.device),
        "scale": inputs.scale,
        "below": threshold(p),
        "up": 1.0 / (1.0 - p),
        "heads": 1 if mask is None else mask.shape[1],
        "length": maps.tokens,
        "height": maps.height,
        "width": maps.width,
        "skip": maps.skip,
        "groups": len(maps.pattern),
        "buckets": maps.buckets,
        "rows": maps.height + (maps.skip > 0),
        "parts": _parts(maps),
        "dim": inputs.q.shape[2],
        "v_dim": inputs.v.shape[2],
        "size": _size(maps),
        "dims": _power(inputs.q.shape[2]),
        "v_dims": _power(inputs.v.shape[2]),
        "bins": _power(maps.buckets),
        "has_k": inputs.k_lookup is not None,
        "has_q": inputs.q_lookup is not None,
        "mask_kind": kind,
        "drops": inputs.dropout is not None,
    }


@lru_cache(maxsize=256)
def _windows(key: str, device: torch.device) -> Tensor:
    """Return the range of buckets, end exclusive, of each pattern and of pairs with skip tokens."""
    maps = maps_of(key, torch.device("cpu"))
    low, high = maps.pattern.amin(1), maps.pattern.amax(1) + 1
    extra = torch.tensor(maps.extra, dtype=torch.int32)
    windows = torch.stack([torch.cat([low, extra]), torch.cat([high, extra + 1])], 1)
    return windows.to(torch.int32).contiguous().to(device)


def _zeros(inputs: Inputs) -> Tensor:
    shape = (*inputs.q.shape[:2], inputs.maps.buckets)
    return torch.zeros(shape, device=inputs.q.device)


def _seed(inputs: Inputs) -> Tensor:
    if inputs.dropout is not None:
        return inputs.dropout.seed
    return torch.zeros(1, dtype=torch.int64, device=inputs.q.device)


def _present(*tensors: Tensor | None, like: Tensor) -> tuple[Tensor, ...]:
    return tuple(like if one is None else one for one in tensors)
