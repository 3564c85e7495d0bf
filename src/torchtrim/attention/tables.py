"""Tables before and after a path: weights to lookups, and gradients of lookups to gradients."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Tables(NamedTuple):
    """The tables of a call, each or None.

    `q` and `k` are weights (H or 1, D, buckets) or lookups (B or 1, H or 1, L, buckets), `v` is
    (H or 1, buckets, D) or (B or 1, H or 1, buckets, D), `bias` is (H or 1, buckets).
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None


def lookup(x: Tensor, table: Tensor | None, scale: float, bias: Tensor | None) -> Tensor | None:
    """What a table says of each token of x (B, H, L, D): (B, H, L, buckets) of x's type."""
    if table is None:
        if bias is None:
            return None
        return bias.to(x.dtype)[None, :, None, :].expand(*x.shape[:3], -1).contiguous()
    found = table.to(x.dtype)
    if table.dim() == 3:
        found = _product(x, found * scale)
    if bias is not None:
        found = found + bias.to(x.dtype)[None, :, None, :]
    return found.expand(*x.shape[:3], -1).contiguous()


def _product(x: Tensor, table: Tensor) -> Tensor:
    if table.shape[0] == 1:
        return (x.reshape(-1, x.shape[-1]) @ table[0]).view(*x.shape[:3], table.shape[-1])
    return x @ table


def values_lookup(grad: Tensor, table: Tensor | None) -> Tensor | None:
    """The product of the output's gradient (B, H, L, D) and each row of the values' table."""
    if table is None:
        return None
    rows = table.to(grad.dtype).transpose(-1, -2)
    return _product(grad, rows) if rows.dim() == 3 else grad @ rows


def add_values(out: Tensor, sums: Tensor | None, table: Tensor | None) -> Tensor:
    """Add to the output what probabilities summed by bucket take from the values' table."""
    if sums is None or table is None:
        return out
    table = table.to(out.dtype)
    if table.dim() == 3 and table.shape[0] == 1:
        flat = out.view(-1, out.shape[-1])
        return flat.addmm_(sums.view(-1, sums.shape[-1]), table[0]).view(out.shape)
    return out.add_(sums @ table)


def table_gradient(
    x: Tensor, of_lookup: Tensor | None, table: Tensor | None, scale: float, of_x: Tensor
) -> Tensor | None:
    """The gradient of a query's or key's table; that of x (B, H, L, D) is added to `of_x`."""
    if table is None or of_lookup is None:
        return None
    if table.dim() == 4:
        return shrunk(of_lookup, table)
    weights = table.to(x.dtype) * scale
    if len(table) == 1:
        rows = of_lookup.reshape(-1, of_lookup.shape[-1])
        of_x.view(-1, of_x.shape[-1]).addmm_(rows, weights[0].T)
        return (x.reshape(-1, x.shape[-1]).T @ rows).mul_(scale)[None].to(table.dtype)
    of_x += of_lookup @ weights.transpose(1, 2)
    return shrunk((x.transpose(-1, -2) @ of_lookup).mul_(scale), table)


def values_gradient(sums: Tensor | None, grad: Tensor, table: Tensor | None) -> Tensor | None:
    """The gradient of the values' table."""
    if table is None or sums is None:
        return None
    if table.dim() == 3 and len(table) == 1:
        flat = sums.reshape(-1, sums.shape[-1]).T @ grad.reshape(-1, grad.shape[-1])
        return flat[None].to(table.dtype)
    return shrunk(sums.transpose(-1, -2) @ grad, table)


def bias_gradient(of_lookup: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """The gradient of the bias."""
    if bias is None or of_lookup is None:
        return None
    return shrunk(of_lookup.sum(2), bias)


def shrunk(full: Tensor, like: Tensor) -> Tensor:
    """Sum what was broadcast from the shape of `like`, in its type."""
    extra = full.dim() - like.dim()
    if extra:
        full = full.sum(tuple(range(extra)))
    dims = [d for d, size in enumerate(like.shape) if size == 1 and full.shape[d] != 1]
    full = full.sum(dims, keepdim=True) if dims else full
    return full.to(like.dtype)
