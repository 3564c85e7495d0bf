"""`RelativeAttention`, a drop-in for the published module, and attention with the encodings of iRPE."""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from torchtrim.attention.buckets import Buckets, Coefficients
from torchtrim.attention.irpe import NAMED, Encoding, RPEConfigs, build_rpe, coefficients_of
from torchtrim.attention.relative import Table, relative_attention
from torchtrim.errors import Unsupported, UsageError


class EncodingTable(NamedTuple):
    """One encoding: its mode (contextual or bias), `METHOD` number, coefficients and table."""

    mode: str
    method: int
    coefficients: Coefficients
    table: Table

    def buckets(self, length: int) -> Buckets:
        """Return the buckets of the largest square of tokens; the rest are skip tokens."""
        side = math.isqrt(length)
        skip = length - side * side
        return Buckets(NAMED[self.method], side, side, skip, "piecewise", self.coefficients)


class Encodings(NamedTuple):
    """The encodings on queries, keys and values."""

    q: EncodingTable | None
    k: EncodingTable | None
    v: EncodingTable | None

    @property
    def given(self) -> list[EncodingTable]:
        """The encodings that are not None."""
        return [one for one in self if one is not None]

    def table(self, letter: str, mode: str) -> Table:
        """Return the table on queries, keys or values if it has that mode."""
        one: EncodingTable | None = getattr(self, letter)
        return one.table if one is not None and one.mode == mode else None


def attention_with_encodings(
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
    """Compute attention (B, H, L, D) with encodings that share a method, coefficients and buckets."""
    kinds = {(one.method, one.coefficients) for one in encodings.given}
    if len(kinds) > 1:
        raise Unsupported(
            "The encodings of queries, keys and values differ in method, coefficients or skip tokens, "
            "but a call has a single map of buckets. Give them the same configuration, as "
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
    """Return the bias whose value for (i, j) is the given one's value for (j, i)."""
    if buckets.method in ("euclidean", "quantization"):
        return table

    def turned(one: Tensor) -> Tensor:
        number = one.shape[-1] - buckets.has_extra
        return torch.cat([one[..., :number].flip(-1), one[..., number:]], -1)

    if isinstance(table, tuple):
        return turned(table[0]), turned(table[1])
    return turned(table)


class RelativeAttention(nn.Module):
    """Multi-head self-attention over (B, L, dim), with the parameters of iRPE's `RPEAttention`.

    The keys of its `state_dict` are `qkv`, `proj`, `rpe_q`, `rpe_k` and `rpe_v`, as published.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = False,
        qk_scale: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        rpe_config: RPEConfigs | None = None,
    ) -> None:
        """Create the layers and tables; `rpe_config` comes from `get_rpe_config`."""
        super().__init__()
        if dim % num_heads:
            raise UsageError(
                f"dim {dim} cannot be divided among {num_heads} heads. Choose a multiple of num_heads."
            )
        self.num_heads, head_dim = num_heads, dim // num_heads
        self.scale = qk_scale or head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        self.rpe_q, self.rpe_k, self.rpe_v = build_rpe(rpe_config, head_dim, num_heads)

    def forward(
        self,
        x: Tensor,
        height: int | None = None,
        width: int | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Compute self-attention of x (B, L, dim). Without height and width, the grid is a square.

        `mask` is as in `relative_attention`; a padding mask is (B, 1, 1, L).
        """
        batch, length, dim = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, dim // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.attn_drop.p if self.training else 0.0
        modules = (self.rpe_q, self.rpe_k, self.rpe_v)
        used = [one for one in modules if one is not None and one.mode]
        if used:
            buckets = used[0].buckets(length, height, width)
            encodings = Encodings(*map(_encoding_of, modules))
            out = attention_with_encodings(
                q, k, v, encodings, buckets, mask=mask, dropout_p=dropout, scale=self.scale
            )
        else:
            out = nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, scale=self.scale
            )
        out = self.proj_drop(self.proj(out.transpose(1, 2).reshape(batch, length, dim)))
        return cast(Tensor, out)


def _encoding_of(one: Encoding | None) -> EncodingTable | None:
    if one is None or one.mode is None or one.method is None:
        return None
    return EncodingTable(one.mode, one.method, coefficients_of(one.rpe_config), one.table)
