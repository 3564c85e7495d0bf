"""How much the kernels' results may differ in half precision, element by element, by their arithmetic.

With `u` half of a type's epsilon, which is what one rounding adds relatively, the kernels round these, and
nothing else of note, since sums are in float32: tables times the scale, and what they say of each token; the
probabilities, before their product with the values, and slopes of scores, before theirs with keys and
queries; that product's sum, the output, and each gradient. Errors of first order are added up as they come,
each with the worst sign:

    of scores         b   = what the lookups add
    of probabilities  dp  = p (b + sum of p b)
    of the output     do  = sum of p b |v - o|  +  u sum of p |v|  +  u |pv|  +  u |o|
    of slopes         ds  = dp |dP - D|  +  p |dO| do

where v has the values' table in it, dP is dO v, and D its mean by p, which backward takes from the rounded
output.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attention.cases import Case


class Bounds(NamedTuple):
    """How much the output, and each leaf's gradient, may differ from what is exact."""

    out: Tensor
    gradients: list[Tensor]


class _Exact(NamedTuple):
    """Of one call in float64: tokens, tables and what each pair says, with heads and batch in front."""

    q: Tensor
    k: Tensor
    v: Tensor
    slope: Tensor
    ids: Tensor
    hot: Tensor
    scale: float


def bounds(case: Case, slope: Tensor) -> Bounds:
    """The bounds of a case without mask, whose tables are shared by heads."""
    u = torch.finfo(case.dtype).eps / 2
    at = _exact(case, slope)
    tables = {name: one.detach().double()[0] for name, one in case.tables.items()}
    scores = at.q @ at.k.mT * at.scale
    off = torch.zeros_like(scores)
    for name, tokens, by_key in (("k_table", at.q, False), ("q_table", at.k, True)):
        if name in tables:
            said, may = _lookup(tokens, tables[name] * at.scale, u)
            scores = scores + _pairs(said, at.ids, by_key=by_key)
            off = off + _pairs(may, at.ids, by_key=by_key)
    p = scores.softmax(-1)
    values = at.v[:, :, None] + (tables["v_table"][at.ids] if "v_table" in tables else 0.0)
    out = torch.einsum("bhij,bhijd->bhid", p, values.expand(*p.shape, -1))
    apart = (values - out[:, :, :, None]).abs()
    of_p = p * (off + (p * off).sum(-1, keepdim=True))
    product = p @ at.v.abs()
    of_out = torch.einsum("bhij,bhijd->bhid", p * off, apart) + 2 * u * product + u * out.abs()
    reach = torch.einsum("bhid,bhijd->bhij", at.slope, values.expand(*p.shape, -1))
    mean = (p * reach).sum(-1, keepdim=True)
    slopes = p * (reach - mean)
    late = (at.slope.abs() * of_out).sum(-1, keepdim=True)
    of_slopes = of_p * (reach - mean).abs() + p * late
    return Bounds(of_out, _gradients(at, tables, u, p, of_p, slopes, of_slopes))


def _exact(case: Case, slope: Tensor) -> _Exact:
    q, k, v = (one.detach().double() for one in case.qkv)
    ids = case.buckets.ids().long()
    hot = torch.nn.functional.one_hot(ids, case.buckets.number).double()
    return _Exact(q, k, v, slope.double(), ids, hot, case.dim**-0.5)


def _lookup(tokens: Tensor, table: Tensor, u: float) -> tuple[Tensor, Tensor]:
    """What a table says of each token, and by how much that may be off."""
    said = tokens @ table
    return said, u * said.abs() + u * (tokens.abs() @ table.abs())


def _pairs(said: Tensor, ids: Tensor, *, by_key: bool) -> Tensor:
    """What a pair gets of what is said of its query, or of its key, by bucket."""
    shape = (*said.shape[:2], *ids.shape)
    if by_key:
        return said.gather(-1, ids.T.expand(shape)).mT
    return said.gather(-1, ids.expand(shape))


def _gradients(
    at: _Exact,
    tables: dict[str, Tensor],
    u: float,
    p: Tensor,
    of_p: Tensor,
    slopes: Tensor,
    of_slopes: Tensor,
) -> list[Tensor]:
    """The bounds of gradients, in the order of the leaves; each is rounded once more at its end."""
    rounded = of_slopes + u * slopes.abs()
    found = {
        "q": at.scale * rounded @ at.k.abs(),
        "k": at.scale * rounded.mT @ at.q.abs(),
        "v": (of_p + u * p).mT @ at.slope.abs(),
    }
    if "k_table" in tables:
        rows = torch.einsum("bhij,ijn->bhin", of_slopes, at.hot)
        found["q"] = found["q"] + at.scale * rows @ tables["k_table"].abs().T
        found["k_table"] = at.scale * torch.einsum("bhid,bhin->dn", at.q.abs(), rows)[None]
    if "q_table" in tables:
        rows = torch.einsum("bhij,ijn->bhjn", of_slopes, at.hot)
        found["k"] = found["k"] + at.scale * rows @ tables["q_table"].abs().T
        found["q_table"] = at.scale * torch.einsum("bhjd,bhjn->dn", at.k.abs(), rows)[None]
    if "v_table" in tables:
        rows = torch.einsum("bhij,ijn->bhin", of_p, at.hot)
        found["v_table"] = torch.einsum("bhin,bhid->nd", rows, at.slope.abs())[None]
    return [found[name] for name in ("q", "k", "v", *tables)]
