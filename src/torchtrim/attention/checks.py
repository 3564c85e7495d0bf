"""What a call of `relative_attention` must look like, and what is said of one that does not."""

from __future__ import annotations

import torch
from torch import Tensor

from torchtrim.attention.buckets import Buckets
from torchtrim.errors import UsageError

_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tokens(q: Tensor, k: Tensor, v: Tensor, buckets: Buckets) -> None:
    """Queries, keys and values are of one grid, batch, type and device."""
    if q.dim() != 4:
        raise UsageError(
            f"q has the shape {_shape(q)}; it must be (batch, heads, tokens, head_dim). "
            "Split heads with .unflatten(-1, (heads, head_dim)).transpose(1, 2)."
        )
    if k.shape != q.shape or v.dim() != 4 or v.shape[:3] != q.shape[:3]:
        raise UsageError(
            f"q is {_shape(q)}, k {_shape(k)}, v {_shape(v)}. Positions are relative in one grid: "
            "k must have the shape of q, and v too except for the last dimension."
        )
    if q.shape[2] != buckets.tokens:
        raise UsageError(
            f"q has {q.shape[2]} tokens, and the buckets are of {buckets.skip} skip tokens and "
            f"{buckets.height} x {buckets.width} others, which makes {buckets.tokens}. "
            "Give the buckets the height, width and skip of this input."
        )
    if q.dtype not in _TYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise UsageError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; they must be of one type out of "
            "float16, bfloat16, float32 and float64."
        )
    if k.device != q.device or v.device != q.device:
        raise UsageError(
            f"q is on {q.device}, k on {k.device}, v on {v.device}. Move them together."
        )


def check_table(name: str, table: Tensor, q: Tensor, rows: int, columns: int) -> None:
    """A table is (H or 1, rows, columns), for one sample each (B or 1, H or 1, rows, columns)."""
    batch, heads = q.shape[:2]
    leading = table.shape[:-2]
    shared = table.dim() == 3 and leading[0] in (1, heads)
    sampled = table.dim() == 4 and leading[0] in (1, batch) and leading[1] in (1, heads)
    if not (shared or sampled) or table.shape[-2:] != (rows, columns):
        raise UsageError(
            f"{name} has the shape {_shape(table)}. Here it must be ({heads} or 1, {rows}, "
            f"{columns}), or ({batch} or 1, {heads} or 1, {rows}, {columns}) with its own for each "
            f"sample; {max(rows, columns)} or {min(rows, columns)} counts the buckets."
        )
    _same_device(name, table, q)


def check_bias(name: str, bias: Tensor, q: Tensor, number: int) -> None:
    """A bias is (H or 1, buckets)."""
    if bias.dim() != 2 or bias.shape[0] not in (1, q.shape[1]) or bias.shape[1] != number:
        raise UsageError(
            f"{name} has the shape {_shape(bias)}; it must be ({q.shape[1]} or 1, {number}): "
            "a number for each head and bucket. A bias for each pair of tokens is a mask."
        )
    _same_device(name, bias, q)


def check_mask(mask: Tensor, q: Tensor) -> None:
    """A mask broadcasts to (B, H, L, L), is bool or floating, and has no gradient."""
    full = (*q.shape[:3], q.shape[2])
    fits = 0 < mask.dim() <= 4 and all(
        size in (1, full[-1 - d]) for d, size in enumerate(reversed(mask.shape))
    )
    if not fits or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise UsageError(
            f"mask is {mask.dtype} of the shape {_shape(mask)}. It must be bool (True attends) or "
            f"floating (added to the scores), and broadcast to {full}: keys that are padding are "
            "(batch, 1, 1, tokens)."
        )
    if mask.requires_grad:
        raise UsageError(
            "mask requires a gradient, which would be of tokens x tokens. Learn a bias by bucket "
            "(the argument bias), or detach the mask."
        )
    _same_device("mask", mask, q)


def check_numbers(dropout_p: float) -> None:
    """The probability of dropout is in [0, 1)."""
    if not 0.0 <= dropout_p < 1.0:
        raise UsageError(f"dropout_p is {dropout_p}; it must be at least 0 and below 1.")


def _same_device(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.device != q.device:
        raise UsageError(f"{name} is on {tensor.device}, q on {q.device}. Move them together.")


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
