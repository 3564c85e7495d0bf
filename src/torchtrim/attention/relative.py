"""The operator: attention with relative positions on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from torchtrim.attention import augmented, ops, paths
from torchtrim.attention.buckets import Buckets
from torchtrim.attention.checks import (
    check_bias,
    check_mask,
    check_numbers,
    check_table,
    check_tokens,
)
from torchtrim.attention.compose import Given, composed
from torchtrim.attention.dropout import new_seed
from torchtrim.errors import UsageError

Table = Tensor | tuple[Tensor, Tensor] | None
__all__ = ["ops", "relative_attention"]


def relative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    buckets: Buckets,
    q_table: Table = None,
    k_table: Table = None,
    v_table: Table = None,
    bias: Table = None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    skip: int | None = None,
    path: str = "auto",
) -> Tensor:
    """Attention whose scores and output know where tokens are relative to each other.

    With b(i, j) the bucket of query i and key j, s the scale, P the softmax of the scores::

        score[i, j] = s q[i] k[j] + s q[i] k_table[:, b(i, j)] + s k[j] q_table[:, b(j, i)]
                      + bias[b(i, j)] + mask[i, j]
        out[i] = sum over j of P[i, j] (v[j] + v_table[b(i, j)])

    as in Wu et al., "Rethinking and Improving Relative Position Encoding for Vision Transformer",
    2021. No L x L tensor is made: blocks of scores are computed, overwritten, and computed again in
    the backward (Dao et al., FlashAttention, 2022). Gradients repeat bitwise. No second derivative.

    Args:
        q, k: (B, H, L, D); v: (B, H, L, Dv). One of float16, bfloat16, float32, float64; under
            autocast its type. L is skip + height * width, skip tokens first, the grid row by row.
        buckets: the map of this grid; see `Buckets`.
        q_table, k_table: weights (H or 1, D, buckets), or for each sample the lookups themselves,
            (B or 1, H or 1, L, buckets), which are added as they are, without scale.
        v_table: (H or 1, buckets, Dv), or (B or 1, H or 1, buckets, Dv).
        bias: (H or 1, buckets), added by bucket.
            For the method cross each of these four is a pair, for rows and for columns.
        mask: bool (True attends) or floating (added); broadcasts to (B, H, L, L); no gradient. A
            query that may see nothing gives zeros.
        dropout_p: probability to drop, 0 <= p < 1, drawn from the default generator of q's device.
        scale: D ** -0.5 unless it is given.
        skip: tokens without a place in front, if `buckets` has none of its own.
        path: auto, pure, compiled (numba) or triton.

    Returns:
        (B, H, L, Dv), of the type of q.

    Raises:
        UsageError: shapes, types, devices or numbers do not fit.
    """
    buckets, (q, k, v) = _with_skip(buckets, skip), map(_autocast, (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    check_tokens(q, k, v, buckets)
    check_numbers(dropout_p)
    paths.check(path)
    if mask is not None:
        check_mask(mask, q)
        mask = mask.view((1,) * (4 - mask.dim()) + mask.shape)
    given = Given(q_table, k_table, v_table, bias)
    return _attended(q, k, v, given, buckets, mask, dropout_p, scale, path)


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: Given,
    buckets: Buckets,
    mask: Tensor | None,
    dropout_p: float,
    scale: float,
    path: str,
) -> Tensor:
    if buckets.method == "cross":
        if path == "auto" and augmented.is_better(q, given, buckets, dropout_p):
            return augmented.attention(q, k, v, given, buckets, mask, scale)
        given = composed(given, buckets)
    tables = _checked(given, q, v, buckets)
    seed = new_seed(q.device) if dropout_p > 0 else None
    return ops.attend(q, k, v, *tables, mask, seed, buckets.key, float(dropout_p), scale, path)


def _with_skip(buckets: Buckets, skip: int | None) -> Buckets:
    if not isinstance(buckets, Buckets):
        raise UsageError(
            f"buckets is a {type(buckets).__name__}; it must be Buckets. For a 14 x 14 image behind "
            "a class token: Buckets.of_ratio('product', 14, 14, skip=1)."
        )
    if skip is None or skip == buckets.skip:
        return buckets
    if buckets.skip:
        raise UsageError(
            f"skip is {skip}, but the buckets were made for {buckets.skip} skip tokens. Give one."
        )
    return replace(buckets, skip=skip)


def _checked(given: Given, q: Tensor, v: Tensor, buckets: Buckets) -> tuple[Tensor | None, ...]:
    for table in given:
        if isinstance(table, tuple):
            raise UsageError(
                f"A pair of tables was given for the method {buckets.method!r}. Only cross has one "
                "for rows and one for columns; give a single table."
            )
    number = buckets.composed
    length, head_dim = q.shape[2:]
    for name, table in (("q_table", given.q), ("k_table", given.k)):
        if isinstance(table, Tensor):
            check_table(name, table, q, length if table.dim() == 4 else head_dim, number)
    if isinstance(given.v, Tensor):
        check_table("v_table", given.v, q, number, v.shape[-1])
    if isinstance(given.bias, Tensor):
        check_bias("bias", given.bias, q, number)
    return tuple(one if isinstance(one, Tensor) else None for one in given)


def _autocast(x: Tensor) -> Tensor:
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))
