"""Attention with the encodings of iRPE, whichever modules hold their tables."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchtrim.attention.buckets import Buckets, Coefficients
from torchtrim.attention.compose import Table
from torchtrim.attention.irpe import NAMED
from torchtrim.attention.relative import relative_attention
from torchtrim.errors import Unsupported


class Encoded(NamedTuple):
    """One encoding: mode (contextual or bias), a number of `METHOD`, coefficients, table."""

    mode: str
    method: int
    coefficients: Coefficients
    table: Table

    def buckets(self, length: int) -> Buckets:
        """Those of a square of tokens, whatever is more than a square being skip tokens."""
        side = math.isqrt(length)
        skip = length - side * side
        return Buckets(NAMED[self.method], side, side, skip, "piecewise", self.coefficients)


class Encodings(NamedTuple):
    """The encodings on queries, keys and values."""

    q: Encoded | None
    k: Encoded | None
    v: Encoded | None

    @property
    def given(self) -> list[Encoded]:
        """Those that are there."""
        return [one for one in self if one is not None]

    def table(self, letter: str, mode: str) -> Table:
        """The table of one, if it has that mode."""
        one = {"q": self.q, "k": self.k, "v": self.v}[letter]
        return one.table if one is not None and one.mode == mode else None


def encoded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encodings: Encodings,
    buckets: Buckets,
    *,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attention (B, H, L, D) with encodings of one method, coefficients and map of buckets."""
    kinds = {(one.method, one.coefficients) for one in encodings.given}
    if len(kinds) > 1:
        raise Unsupported(
            "Queries, keys and values have encodings of different methods, coefficients or skip "
            "tokens, and one call uses one map of buckets. Give them the same configuration, as "
            "get_rpe_config does."
        )
    return relative_attention(
        q,
        k,
        v,
        buckets=buckets,
        q_table=encodings.table("q", "contextual"),
        k_table=encodings.table("k", "contextual"),
        v_table=encodings.table("v", "contextual"),
        bias=_bias(encodings, buckets),
        mask=mask,
        dropout_p=dropout_p,
        scale=scale,
    )


def _bias(encodings: Encodings, buckets: Buckets) -> Table:
    on_keys, on_queries = encodings.table("k", "bias"), encodings.table("q", "bias")
    if on_queries is None:
        return on_keys
    turned = mirrored(on_queries, buckets)
    if on_keys is None:
        return turned
    if isinstance(on_keys, tuple) and isinstance(turned, tuple):
        return on_keys[0] + turned[0], on_keys[1] + turned[1]
    assert isinstance(on_keys, Tensor)
    assert isinstance(turned, Tensor)
    return on_keys + turned


def mirrored(table: Tensor | tuple[Tensor, Tensor], buckets: Buckets) -> Table:
    """A bias whose bucket of (i, j) is what the given one has for (j, i)."""
    if buckets.method in ("euclidean", "quantization"):
        return table
    kept = buckets.has_extra

    def turned(one: Tensor) -> Tensor:
        number = one.shape[-1] - kept
        return torch.cat([one[..., :number].flip(-1), one[..., number:]], -1)

    if isinstance(table, tuple):
        return turned(table[0]), turned(table[1])
    return turned(table)
