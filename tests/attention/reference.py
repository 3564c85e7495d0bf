"""Relative attention with every tensor written out: slow, plain, and what all paths must equal.

`attention` follows the formula with gathers that autograd differentiates. `original` does what the
published code does, step by step, with its L x L tensors. `gathered` is the same with `gather` and
`scatter_add`, the best that a few lines of PyTorch do.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

INFINITY = float("inf")


def published_index(offset: Tensor, ratio: float) -> Tensor:
    """Equation 18, by masks, on offsets of any shape."""
    alpha, beta, gamma = 1 * ratio, 2 * ratio, 8 * ratio
    far = offset.abs() > alpha
    size = offset[far].abs()
    scaled = alpha + torch.log(size / alpha) / math.log(gamma / alpha) * (beta - alpha)
    index = offset.round().long()
    index[far] = (torch.sign(offset[far]) * scaled.round().clip(max=beta)).long()
    return index


def published_ids(method: str, height: int, width: int, skip: int, ratio: float) -> Tensor:
    """Bucket ids (L, L); for cross (2, L, L): rows, columns. Skip tokens have one id more."""
    rows = torch.arange(height).repeat_interleave(width)
    columns = torch.arange(width).repeat(height)
    down, right = rows[:, None] - rows[None], columns[:, None] - columns[None]
    squares = down.square() + right.square()
    most = int(2 * ratio)
    side = 2 * most + 1
    index = lambda offset: published_index(offset, ratio) + most  # noqa: E731
    if method == "product":
        ids, number = index(down) * side + index(right), side * side
    elif method == "cross":
        ids, number = torch.stack([index(down), index(right)]), side
    elif method == "euclidean":
        ids, number = index(squares.float().sqrt().round()), side
    else:
        ids, number = index(squares), side
    length = skip + height * width
    padded = torch.full((*ids.shape[:-2], length, length), number)
    padded[..., skip:, skip:] = ids
    return padded


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ids: Tensor,
    q_table: Tensor | None = None,
    k_table: Tensor | None = None,
    v_table: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    keep: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention with positions; `keep` (B, H, L, L) multiplies the probabilities."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q * scale) @ k.transpose(-1, -2)
    full = ids.expand(scores.shape)
    if k_table is not None:
        scores = scores + _looked_up(q * scale, k_table, scores).gather(-1, full)
    if q_table is not None:
        from_keys = _looked_up(k * scale, q_table, scores).gather(-1, full)
        scores = scores + from_keys.transpose(-1, -2)
    if bias is not None:
        scores = scores + bias[:, ids]
    if mask is not None:
        allowed = mask if mask.dtype == torch.bool else None
        scores = scores + mask if allowed is None else scores.masked_fill(~allowed, -INFINITY)
    blind = (scores == -INFINITY).all(-1, True)
    weights = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
    if keep is not None:
        weights = weights * keep
    out = weights @ v
    if v_table is not None:
        sums = weights.new_zeros((*weights.shape[:-1], v_table.shape[-2]))
        out = out + sums.scatter_add(-1, full, weights) @ v_table
    return out


def _looked_up(x: Tensor, table: Tensor, scores: Tensor) -> Tensor:
    lookup = table if table.dim() == 4 else x @ table
    return lookup.expand(*scores.shape[:-1], lookup.shape[-1])


def original(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor,
    q_table: Tensor | None,
    k_table: Tensor | None,
    v_table: Tensor | None,
) -> Tensor:
    """The published way: indices of flat lookups, and for values a table of (H, L, L, D)."""
    length, head_dim = q.shape[-2:]
    q = q * head_dim**-0.5
    scores = q @ k.transpose(-2, -1)
    if k_table is not None:
        scores = scores + _original_index(q, ids, k_table)
    if q_table is not None:
        scores = scores + _original_index(k * head_dim**-0.5, ids, q_table).transpose(2, 3)
    weights = scores.softmax(-1)
    out = weights @ v
    if v_table is not None:
        written_out = v_table[:, ids.flatten()].view(-1, length, length, head_dim)
        out = out + torch.matmul(weights.permute(1, 2, 0, 3), written_out).permute(2, 0, 1, 3)
    return out


def _original_index(x: Tensor, ids: Tensor, table: Tensor) -> Tensor:
    batch, heads, length, head_dim = x.shape
    buckets = table.shape[-1]
    lookup = torch.matmul(x.transpose(0, 1).reshape(-1, batch * length, head_dim), table)
    lookup = lookup.view(-1, batch, length, buckets).transpose(0, 1)
    if lookup.shape[1] != heads:
        lookup = lookup.reshape(heads, batch, length, buckets).transpose(0, 1)
    flat = (ids + torch.arange(0, length * buckets, buckets)[:, None]).flatten()
    return lookup.flatten(2)[:, :, flat].view(batch, -1, length, length)


def gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor,
    q_table: Tensor | None,
    k_table: Tensor | None,
    v_table: Tensor | None,
) -> Tensor:
    """The same by `gather` and `scatter_add`."""
    return attention(q, k, v, ids=ids, q_table=q_table, k_table=k_table, v_table=v_table)


def composed(rows: Tensor, columns: Tensor, skip: int, dim: int) -> Tensor:
    """One table of all pairs of a cross method's two, the buckets along `dim`."""
    r, c = rows.movedim(dim, -1), columns.movedim(dim, -1)
    kept = (x[..., :-1] if skip else x for x in (r, c))
    first, second = kept
    both = (first[..., :, None] + second[..., None, :]).flatten(-2)
    if skip:
        both = torch.cat([both, r[..., -1:] + c[..., -1:]], -1)
    return both.movedim(-1, dim)


def keywords(**given: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in given.items() if value is not None}
