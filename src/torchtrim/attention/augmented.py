"""The cross method through torch's own attention, exactly.

A score of cross is `q k + a[y] + b[x]` where y and x are the row and column of the key: appended to
q, with one-hot rows and columns appended to k, it is one product. The same appended to v gives the
sums of probabilities by row and column, which the values' table is applied to.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtrim.attention.axes import AXES
from torchtrim.attention.buckets import Buckets
from torchtrim.attention.compose import Given, pair
from torchtrim.attention.paths import available

_MOST_COMPOSED = 400


def is_better(q: Tensor, given: Given, buckets: Buckets, dropout_p: float) -> bool:
    """Whether it is the faster way. It has no dropout, whose draws would be others."""
    fast = {"cpu": "compiled", "cuda": "triton"}.get(q.device.type, "")
    has_fast = bool(fast) and available(fast) and q.dtype != torch.float64
    many = buckets.rows * buckets.columns > _MOST_COMPOSED
    return dropout_p == 0 and q.dtype != torch.float64 and (many or not has_fast)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: Given,
    buckets: Buckets,
    mask: Tensor | None,
    scale: float,
) -> Tensor:
    """The attention of `relative_attention` for cross, with arguments that were checked."""
    values = v.shape[-1]
    spots = _Spots(buckets, q)
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
    out = F.scaled_dot_product_attention(
        left_all, right_all, wide_all, attn_mask=_mask(mask, q), scale=1.0
    )
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


def _mask(mask: Tensor | None, q: Tensor) -> Tensor | None:
    return mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)


class _Spots:
    """Spots of keys: each row, each column, and one of all skip tokens. `one_hot` is (L, spots)."""

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
        self.spread_rows = _spread(buckets, height, buckets.rows, like)
        self.spread_columns = _spread(buckets, width, buckets.columns, like)

    def of_values(self, marginals: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """What the tables of values add for sums of probabilities by spot."""
        down, right = marginals[..., : self.height], marginals[..., self.height :]
        right = right[..., : self.width]
        sums = [
            torch.einsum("bhyxs,ysn->bhyxn", self._grid(down), self.spread_rows).flatten(2, 3),
            torch.einsum("bhyxs,xsn->bhyxn", self._grid(right), self.spread_columns).flatten(2, 3),
        ]
        if self.skip:
            with_skip = marginals[..., -1:]
            all_of_it = with_skip + down.sum(-1, keepdim=True)
            last = torch.cat([all_of_it[:, :, : self.skip], with_skip[:, :, self.skip :]], 2)
            sums = [torch.cat([F.pad(one, (0, 0, self.skip, 0)), last], -1) for one in sums]
        rows, columns = (one @ t.to(one.dtype) for one, t in zip(sums, tables, strict=True))
        return rows + columns

    def seen(self, lookups: tuple[Tensor, Tensor]) -> Tensor:
        """(B, H, L, spots): what lookups of tokens say of a token in each spot."""
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


def _spread(buckets: Buckets, size: int, number: int, like: Tensor) -> Tensor:
    """(size, size, buckets): 1 at the bucket of a query's and a key's place on an axis."""
    places = torch.arange(size, device=like.device)
    ids = AXES[buckets.axis].ids(torch.arange(1 - size, size), buckets.parameters)
    step = places[:, None] - places[None, :] + size - 1
    return F.one_hot(ids.to(like.device)[step], number).to(like.dtype)
