"""The cross method as the product method: one table of all pairs of a row's and a column's bucket.

`x R[:, r] + x C[:, c]` is `x (R[:, r] + C[:, c])`, and the same holds for values and for biases.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchtrim.attention.buckets import Buckets
from torchtrim.errors import UsageError

Table = Tensor | tuple[Tensor, Tensor] | None


class GivenTables(NamedTuple):
    """The tables as they were given: each one, a pair for cross, or None."""

    q: Table
    k: Table
    v: Table
    bias: Table


def composed(given: GivenTables, buckets: Buckets) -> GivenTables:
    """One table for each pair."""
    q, k, bias = (_one(table, buckets, -1) for table in (given.q, given.k, given.bias))
    return GivenTables(q, k, _one(given.v, buckets, -2), bias)


def pair(table: Table, buckets: Buckets, dim: int) -> tuple[Tensor, Tensor] | None:
    """The two tables of the cross method, whose buckets are along `dim`."""
    if table is None:
        return None
    if not isinstance(table, tuple | list) or len(table) != 2:
        raise UsageError(
            "The method cross needs pairs of tables, (rows, columns); one table was given. "
            "Give both, or buckets of the method product."
        )
    rows, columns = table
    wanted = (buckets.rows + buckets.has_extra, buckets.columns + buckets.has_extra)
    if (rows.shape[dim], columns.shape[dim]) != wanted or rows.dim() != columns.dim():
        raise UsageError(
            f"The pair of tables has {rows.shape[dim]} buckets of rows and {columns.shape[dim]} of "
            f"columns; this grid has {wanted[0]} and {wanted[1]}, those of skip tokens included."
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
