"""What Triton kernels share: tokens of an image row, buckets of two of them, sums by bucket.

A tile is the queries of one image row, or of a part of it, against the keys of another. Its row
bucket is one number, so that lookups are gathered, and sums written, only when that changes. Skip
tokens are a row of their own in front of the image.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")
constexpr = Any


@triton.jit  # type: ignore[untyped-decorator]
def row_tokens(number: Any, rows: Any, height: Any, width: Any, skip: Any, size: constexpr) -> Any:
    """The image row (-1 for skip tokens), columns, tokens and which of them exist. Rows have a
    number, those of the next part of the columns after all rows of the first."""
    y = number % rows - (rows - height)
    x = number // rows * size + tl.arange(0, size)
    count = tl.where(y < 0, skip, width)
    token = tl.where(y < 0, x, skip + y * width + x)
    return y, x, token, x < count


@triton.jit  # type: ignore[untyped-decorator]
def pair_code(yi: Any, yj: Any, group: Any, height: Any, groups: Any) -> Any:
    """The pattern of two image rows; beyond all patterns where one of them is of skip tokens."""
    inside = (yi >= 0) & (yj >= 0)
    found = tl.load(group + yi - yj + height - 1, mask=inside, other=0)
    special = tl.where(yj >= 0, 0, tl.where(yi >= 0, 1, 2))
    return tl.where(inside, found, groups + special)


@triton.jit  # type: ignore[untyped-decorator]
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
    """The bucket of every pair of two rows' tokens, (size, size)."""
    inside = mi[:, None] & mj[None, :]
    place = tl.minimum(code, groups - 1) * (2 * width - 1) + xi[:, None] - xj[None, :] + width - 1
    found = tl.load(pattern + place, mask=inside, other=0)
    return tl.where(code < groups, found, tl.load(windows + 2 * code))


@triton.jit  # type: ignore[untyped-decorator]
def add_by_bucket(
    sums: Any, waiting: Any, ids: Any, code: Any, windows: Any, size: constexpr
) -> Any:
    """Add each row of `waiting` to the buckets of its columns, one bucket at a time."""
    buckets = tl.arange(0, size)
    for bucket in range(tl.load(windows + 2 * code), tl.load(windows + 2 * code + 1)):
        total = tl.sum(tl.where(ids == bucket, waiting, 0.0), 1)
        sums += tl.where((buckets == bucket)[None, :], total[:, None], 0.0)
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def load_rows(start: Any, token: Any, exists: Any, width: Any, size: constexpr) -> Any:
    """Rows of a (L, width) tensor, with zeros up to `size` columns."""
    column = tl.arange(0, size)
    inside = exists[:, None] & (column < width)[None, :]
    return tl.load(start + token[:, None] * width + column[None, :], mask=inside, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def store_rows(
    start: Any, value: Any, token: Any, exists: Any, width: Any, size: constexpr
) -> None:
    """Write rows of a (L, width) tensor."""
    column = tl.arange(0, size)
    inside = exists[:, None] & (column < width)[None, :]
    to = start + token[:, None] * width + column[None, :]
    tl.store(to, value.to(start.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def looked_up(start: Any, rows: Any, exists: Any, ids: Any, buckets: Any) -> Any:
    """What the lookup of one token says of each pair; `rows` and `exists` are (size, size)."""
    return tl.load(start + rows * buckets + ids, mask=exists, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
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
    """Scores under the mask: kind 0 has none, 1 says who attends, 2 is added."""
    place = i * stride_i + j * stride_j
    if kind == 1:
        allowed = tl.load(mask + place, mask=exists, other=0)
        scores = tl.where(allowed != 0, scores, float("-inf"))
    if kind == 2:
        scores += tl.load(mask + place, mask=exists, other=0.0).to(tl.float32)
    return tl.where(exists, scores, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def mixed(x: Any) -> Any:
    """See `dropout.mixed`."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit  # type: ignore[untyped-decorator]
def kept(seed: Any, row: Any, j: Any, below: Any, up: Any) -> Any:
    """0 or `up` for each pair; see `dropout.kept`."""
    number = tl.load(seed)
    low = (number & 0xFFFFFFFF).to(tl.uint32)
    high = ((number >> 32) & 0xFFFFFFFF).to(tl.uint32)
    start = mixed(mixed((row & 0xFFFFFFFF).to(tl.uint32) ^ low) ^ high)
    bits = mixed(start + j.to(tl.uint32) * 0x9E3779B9)
    return tl.where(bits.to(tl.int64) >= below, up, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def without_dropped(
    p: Any, d: Any, seed: Any, row: Any, j: Any, below: Any, up: Any, drops: constexpr
) -> Any:
    """Probabilities and their slopes under dropout."""
    dropped = p
    if drops:
        keep = kept(seed, row, j, below, up)
        d, dropped = d * keep, p * keep
    return dropped, d


@triton.jit  # type: ignore[untyped-decorator]
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
    """`add_by_bucket` of two, if they are asked for."""
    if has_first:
        first = add_by_bucket(first, first_waiting, ids, code, windows, size)
    if has_second:
        second = add_by_bucket(second, second_waiting, ids, code, windows, size)
    return first, second
