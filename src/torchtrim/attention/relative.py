"""The public operator: attention with relative positions on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtrim.attention import ops
from torchtrim.attention.buckets import AXES, Buckets
from torchtrim.attention.core import new_seed
from torchtrim.attention.ops import available
from torchtrim.errors import UsageError

Table = Tensor | tuple[Tensor, Tensor] | None


class TableArguments(NamedTuple):
    """The table arguments of a call: each is a table, a pair for cross, or None."""

    q: Table
    k: Table
    v: Table
    bias: Table


def compose_tables(given: TableArguments, buckets: Buckets) -> TableArguments:
    """Replace the two tables of the cross method by one table over all pairs of row and column buckets.

    `x R[:, r] + x C[:, c]` is `x (R[:, r] + C[:, c])`; the same holds for values and biases.
    """
    q, k, bias = (_one(table, buckets, -1) for table in (given.q, given.k, given.bias))
    return TableArguments(q, k, _one(given.v, buckets, -2), bias)


def pair(table: Table, buckets: Buckets, dim: int) -> tuple[Tensor, Tensor] | None:
    """Check and return the two tables of the cross method, with buckets along `dim`."""
    if table is None:
        return None
    if not isinstance(table, tuple | list) or len(table) != 2:
        raise UsageError(
            "The method cross needs pairs of tables, (rows, columns), but got a single table. "
            "Pass both, or buckets of the method product."
        )
    rows, columns = table
    wanted = (buckets.rows + buckets.has_extra, buckets.columns + buckets.has_extra)
    if (rows.shape[dim], columns.shape[dim]) != wanted or rows.dim() != columns.dim():
        raise UsageError(
            f"The pair of tables has {rows.shape[dim]} row buckets and {columns.shape[dim]} column "
            f"buckets; this grid has {wanted[0]} and {wanted[1]}, including those of skip tokens."
        )
    return rows, columns


def _one(table: Table, buckets: Buckets, dim: int) -> Tensor | None:
    two = pair(table, buckets, dim)
    if two is None:
        return None
    rows, columns = (one.movedim(dim, -1) for one in two)
    down, right = rows[..., : buckets.rows, None], columns[..., None, : buckets.columns]
    every = (down + right).flatten(-2)
    if buckets.has_extra:
        extra = rows[..., buckets.rows :] + columns[..., buckets.columns :]
        every = torch.cat([every, extra], -1)
    return every.movedim(-1, dim)


# Arbitrary; above it, composed tables cost more than the one-hot columns of `augmented_attention`.
_MOST_COMPOSED = 400


def augmented_is_better(q: Tensor, buckets: Buckets, dropout_p: float) -> bool:
    """Return True if `augmented_attention` is faster. It has no dropout: its random draws would differ."""
    fast = {"cpu": "compiled", "cuda": "triton"}.get(q.device.type, "")
    has_fast = bool(fast) and available(fast) and q.dtype != torch.float64
    many = buckets.rows * buckets.columns > _MOST_COMPOSED
    return dropout_p == 0 and q.dtype != torch.float64 and (many or not has_fast)


def augmented_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: TableArguments,
    buckets: Buckets,
    mask: Tensor | None,
    scale: float,
) -> Tensor:
    """Compute the cross method exactly with torch's own attention, for checked arguments.

    A score of cross is `q k + a[y] + b[x]`, with y and x the row and column of the key. With a and b appended
    to q, and one-hot rows and columns to k, it is a single product. One-hot columns appended to v return the
    sums of probabilities by row and column, which multiply the values' table.
    """
    values = v.shape[-1]
    spots = _KeyPositions(buckets, q)
    left, right = [q * scale], [k]
    keys, biases, queries = (pair(one, buckets, -1) for one in (given.k, given.bias, given.q))
    if keys is not None or biases is not None:
        left.append(spots.seen(_lookups(q, keys, biases, scale)))
        right.append(spots.one_hot.expand(*q.shape[:3], -1))
    if queries is not None:
        left.append(spots.one_hot.expand(*q.shape[:3], -1))
        right.append(spots.seen(_lookups(k, queries, None, scale)))
    wide = [v]
    tables = pair(given.v, buckets, -2)
    if tables is not None:
        wide.append(spots.one_hot.expand(*q.shape[:3], -1))
    parts = [torch.cat(one, -1) for one in (left, right, wide)]
    longest = max(one.shape[-1] for one in parts)
    left_all, right_all, wide_all = (F.pad(one, (0, longest - one.shape[-1])) for one in parts)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    out = F.scaled_dot_product_attention(left_all, right_all, wide_all, attn_mask=mask, scale=1.0)
    plain = out[..., :values]
    if tables is None:
        return plain
    marginals = out[..., values : values + spots.one_hot.shape[-1]]
    return plain + spots.of_values(marginals, tables)


def _lookups(
    x: Tensor,
    tables: tuple[Tensor, Tensor] | None,
    biases: tuple[Tensor, Tensor] | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    found = []
    for side in range(2):
        total = x.new_zeros(1)
        if tables is not None:
            table = tables[side].to(x.dtype)
            total = total + (table if table.dim() == 4 else x @ (table * scale))
        if biases is not None:
            total = total + biases[side].to(x.dtype)[None, :, None, :]
        found.append(total.expand(*x.shape[:3], -1))
    return found[0], found[1]


class _KeyPositions:
    """Positions of keys: each row, each column, and one for all skip tokens. `one_hot` is (L, positions)."""

    def __init__(self, buckets: Buckets, like: Tensor) -> None:
        self.skip, self.height, self.width = buckets.skip, buckets.height, buckets.width
        height, width = self.height, self.width
        grid = torch.arange(height * width, device=like.device)
        rows = F.one_hot(grid.div(width, rounding_mode="floor"), height)
        columns = F.one_hot(grid % width, width)
        one_hot = torch.cat([rows, columns], -1)
        if self.skip:
            last = F.one_hot(torch.full((self.skip,), height + width, device=like.device))
            one_hot = torch.cat([last, F.pad(one_hot, (0, 1))])
        self.one_hot = one_hot.to(like.dtype)
        self.spread_rows = _bucket_one_hot(buckets, height, buckets.rows, like)
        self.spread_columns = _bucket_one_hot(buckets, width, buckets.columns, like)

    def of_values(self, marginals: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Return the output of the values' tables for probabilities summed by position."""
        down, right = marginals[..., : self.height], marginals[..., self.height :]
        right = right[..., : self.width]
        sums = [
            torch.einsum("bhyxs,ysn->bhyxn", self._grid(down), self.spread_rows).flatten(2, 3),
            torch.einsum("bhyxs,xsn->bhyxn", self._grid(right), self.spread_columns).flatten(2, 3),
        ]
        if self.skip:
            with_skip = marginals[..., -1:]
            total = with_skip + down.sum(-1, keepdim=True)
            last = torch.cat([total[:, :, : self.skip], with_skip[:, :, self.skip :]], 2)
            sums = [torch.cat([F.pad(one, (0, 0, self.skip, 0)), last], -1) for one in sums]
        rows, columns = (one @ t.to(one.dtype) for one, t in zip(sums, tables, strict=True))
        return rows + columns

    def seen(self, lookups: tuple[Tensor, Tensor]) -> Tensor:
        """Expand lookups of tokens by bucket to lookups by key position, (B, H, L, positions)."""
        rows, columns = self.spread_rows, self.spread_columns
        numbers = (rows.shape[-1], columns.shape[-1])
        by_row, by_column = (x[..., :n] for x, n in zip(lookups, numbers, strict=True))
        down = torch.einsum("bhyxn,ysn->bhyxs", self._grid(by_row), rows).flatten(2, 3)
        right = torch.einsum("bhyxn,xsn->bhyxs", self._grid(by_column), columns).flatten(2, 3)
        if not self.skip:
            return torch.cat([down, right], -1)
        extra = [x[..., n:] for x, n in zip(lookups, numbers, strict=True)]
        first = [x[:, :, : self.skip] for x in extra]
        down = torch.cat([first[0].expand(*first[0].shape[:3], self.height), down], 2)
        right = torch.cat([first[1].expand(*first[1].shape[:3], self.width), right], 2)
        return torch.cat([down, right, extra[0] + extra[1]], -1)

    def _grid(self, x: Tensor) -> Tensor:
        grid = x[:, :, self.skip :]
        return grid.reshape(*x.shape[:2], self.height, self.width, x.shape[-1])


def _bucket_one_hot(buckets: Buckets, size: int, number: int, like: Tensor) -> Tensor:
    """Return (size, size, buckets): the one-hot bucket of each query and key position on an axis."""
    places = torch.arange(size, device=like.device)
    ids = AXES[buckets.axis].ids(torch.arange(1 - size, size), buckets.parameters)
    step = places[:, None] - places[None, :] + size - 1
    return F.one_hot(ids.to(like.device)[step], number).to(like.dtype)


_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tokens(q: Tensor, k: Tensor, v: Tensor, buckets: Buckets) -> None:
    """Check that queries, keys and values have the same grid, batch, type and device."""
    if q.dim() != 4:
        raise UsageError(
            f"q has the shape {_shape(q)}; it must be (batch, heads, tokens, head_dim). "
            "Split heads with .unflatten(-1, (heads, head_dim)).transpose(1, 2)."
        )
    if k.shape != q.shape or v.dim() != 4 or v.shape[:3] != q.shape[:3]:
        raise UsageError(
            f"q is {_shape(q)}, k {_shape(k)}, v {_shape(v)}. Positions are relative within one grid: "
            "k must have the shape of q, and so must v except for the last dimension."
        )
    if q.shape[2] != buckets.tokens:
        raise UsageError(
            f"q has {q.shape[2]} tokens, but the buckets have {buckets.tokens}: {buckets.skip} skip tokens "
            f"and a grid of {buckets.height} x {buckets.width}. "
            "Create the buckets with the height, width and skip of this input."
        )
    if q.dtype not in _TYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise UsageError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; they must all be one of "
            "float16, bfloat16, float32 and float64."
        )
    if k.device != q.device or v.device != q.device:
        raise UsageError(
            f"q is on {q.device}, k on {k.device}, v on {v.device}. Move them together."
        )


def check_table(name: str, table: Tensor, q: Tensor, rows: int, columns: int) -> None:
    """Check that a table is (H or 1, rows, columns), or per sample (B or 1, H or 1, rows, columns)."""
    batch, heads = q.shape[:2]
    leading = table.shape[:-2]
    shared = table.dim() == 3 and leading[0] in (1, heads)
    sampled = table.dim() == 4 and leading[0] in (1, batch) and leading[1] in (1, heads)
    if not (shared or sampled) or table.shape[-2:] != (rows, columns):
        raise UsageError(
            f"{name} has the shape {_shape(table)}. Here it must be ({heads} or 1, {rows}, "
            f"{columns}), or ({batch} or 1, {heads} or 1, {rows}, {columns}) with one per sample; "
            f"{max(rows, columns)} or {min(rows, columns)} is the number of buckets."
        )
    _same_device(name, table, q)


def check_bias(name: str, bias: Tensor, q: Tensor, number: int) -> None:
    """Check that a bias is (H or 1, buckets)."""
    if bias.dim() != 2 or bias.shape[0] not in (1, q.shape[1]) or bias.shape[1] != number:
        raise UsageError(
            f"{name} has the shape {_shape(bias)}; it must be ({q.shape[1]} or 1, {number}): "
            "one number per head and bucket. Pass a bias for each pair of tokens as the mask."
        )
    _same_device(name, bias, q)


def check_mask(mask: Tensor, q: Tensor) -> None:
    """Check that a mask broadcasts to (B, H, L, L), is bool or floating, and requires no gradient."""
    full = (*q.shape[:3], q.shape[2])
    fits = 0 < mask.dim() <= 4 and all(
        size in (1, full[-1 - d]) for d, size in enumerate(reversed(mask.shape))
    )
    if not fits or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise UsageError(
            f"mask is {mask.dtype} of shape {_shape(mask)}. It must be bool (True attends) or "
            f"floating (added to the scores), and broadcast to {full}; a padding mask is "
            "(batch, 1, 1, tokens)."
        )
    if mask.requires_grad:
        raise UsageError(
            "mask requires a gradient, which would have tokens x tokens elements. Learn a bias by bucket "
            "(the argument bias), or detach the mask."
        )
    _same_device("mask", mask, q)


def check_numbers(dropout_p: float) -> None:
    """Check that the dropout probability is in [0, 1)."""
    if not 0.0 <= dropout_p < 1.0:
        raise UsageError(f"dropout_p is {dropout_p}; it must be at least 0 and below 1.")


def _same_device(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.device != q.device:
        raise UsageError(f"{name} is on {tensor.device}, q on {q.device}. Move them together.")


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


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
    """Compute attention with relative positions in its scores and its output.

    With b(i, j) the bucket of query i and key j, s the scale, P the softmax of the scores::

        score[i, j] = s q[i] k[j] + s q[i] k_table[:, b(i, j)] + s k[j] q_table[:, b(j, i)]
                      + bias[b(i, j)] + mask[i, j]
        out[i] = sum over j of P[i, j] (v[j] + v_table[b(i, j)])

    as in Wu et al., "Rethinking and Improving Relative Position Encoding for Vision Transformer", 2021. No L
    x L tensor is allocated: blocks of scores are computed, overwritten, and recomputed in backward (Dao et
    al., FlashAttention, 2022). Gradients are deterministic. Double backward is not supported.

    Args:
        q, k: (B, H, L, D); v: (B, H, L, Dv). One of float16, bfloat16, float32, float64; under
            autocast its type. L is skip + height * width, skip tokens first, the grid row by row.
        buckets: the buckets of this grid; see `Buckets`.
        q_table, k_table: weights (H or 1, D, buckets), or lookups per sample,
            (B or 1, H or 1, L, buckets), which are added without scaling.
        v_table: (H or 1, buckets, Dv), or (B or 1, H or 1, buckets, Dv).
        bias: (H or 1, buckets), added by bucket.
            For the method cross, each of these four is a pair, for rows and for columns.
        mask: bool (True attends) or floating (added); broadcasts to (B, H, L, L); requires no gradient. The
            output of a fully masked query is zero.
        dropout_p: dropout probability, 0 <= p < 1, drawn from the default generator of q's device.
        scale: D ** -0.5 by default.
        skip: number of leading tokens without a position, if `buckets` has no skip tokens.
        path: auto, pure, compiled (numba) or triton.

    Returns:
        The output, (B, H, L, Dv), of the type of q.

    Raises:
        UsageError: shapes, types, devices or numbers do not match.
    """
    buckets, (q, k, v) = _with_skip(buckets, skip), map(_autocast, (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    check_tokens(q, k, v, buckets)
    check_numbers(dropout_p)
    ops.check(path)
    if mask is not None:
        check_mask(mask, q)
        mask = mask.view((1,) * (4 - mask.dim()) + mask.shape)
    given = TableArguments(q_table, k_table, v_table, bias)
    return _attended(q, k, v, given, buckets, mask, dropout_p, scale, path)


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: TableArguments,
    buckets: Buckets,
    mask: Tensor | None,
    dropout_p: float,
    scale: float,
    path: str,
) -> Tensor:
    if buckets.method == "cross":
        if path == "auto" and augmented_is_better(q, buckets, dropout_p):
            return augmented_attention(q, k, v, given, buckets, mask, scale)
        given = compose_tables(given, buckets)
    tables = _checked(given, q, v, buckets)
    seed = new_seed(q.device) if dropout_p > 0 else None
    return ops.attend(q, k, v, *tables, mask, seed, buckets.key, float(dropout_p), scale, path)


def _with_skip(buckets: Buckets, skip: int | None) -> Buckets:
    if not isinstance(buckets, Buckets):
        raise UsageError(
            f"buckets is a {type(buckets).__name__}; it must be Buckets. For a 14 x 14 image after a "
            "class token: Buckets.of_ratio('product', 14, 14, skip=1)."
        )
    if skip is None or skip == buckets.skip:
        return buckets
    if buckets.skip:
        raise UsageError(
            f"skip is {skip}, but the buckets have {buckets.skip} skip tokens. Pass only one of them."
        )
    return replace(buckets, skip=skip)


def _checked(
    given: TableArguments, q: Tensor, v: Tensor, buckets: Buckets
) -> tuple[Tensor | None, ...]:
    for table in given:
        if isinstance(table, tuple):
            raise UsageError(
                f"Got a pair of tables for the method {buckets.method!r}. Only cross has one for rows "
                "and one for columns; pass a single table."
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
