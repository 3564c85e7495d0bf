"""A self-attention module with relative positions, in place of the published one."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from torchtrim.attention.buckets import Buckets
from torchtrim.attention.compose import Table
from torchtrim.attention.irpe import Encoding, RPEConfigs, build_rpe
from torchtrim.attention.relative import relative_attention
from torchtrim.errors import Unsupported, UsageError


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
        """`rpe_config` comes from `get_rpe_config`."""
        super().__init__()
        if dim % num_heads:
            raise UsageError(
                f"dim {dim} cannot be divided among {num_heads} heads. Choose a multiple of them."
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
        """Attend in (B, L, dim). Without height and width the grid is a square.

        `mask` is as in `relative_attention`; for keys that are padding (B, 1, 1, L).
        """
        batch, length, dim = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, dim // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = self._attended(q, k, v, height, width, mask)
        out = self.proj_drop(self.proj(out.transpose(1, 2).reshape(batch, length, dim)))
        return cast(Tensor, out)

    def _attended(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        height: int | None,
        width: int | None,
        mask: Tensor | None,
    ) -> Tensor:
        dropout = self.attn_drop.p if self.training else 0.0
        encodings = [one for one in (self.rpe_q, self.rpe_k, self.rpe_v) if one and one.mode]
        if not encodings:
            return nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, scale=self.scale
            )
        _check_alike(encodings)
        buckets = encodings[0].buckets(q.shape[2], height, width)
        return relative_attention(
            q,
            k,
            v,
            buckets=buckets,
            q_table=_table(self.rpe_q, "contextual"),
            k_table=_table(self.rpe_k, "contextual"),
            v_table=_table(self.rpe_v, "contextual"),
            bias=self._bias(buckets),
            mask=mask,
            dropout_p=dropout,
            scale=self.scale,
        )

    def _bias(self, buckets: Buckets) -> Table:
        on_keys, on_queries = _table(self.rpe_k, "bias"), _table(self.rpe_q, "bias")
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


def _table(one: Encoding | None, mode: str) -> Tensor | tuple[Tensor, Tensor] | None:
    return one.table if one is not None and one.mode == mode else None


def _check_alike(encodings: list[Encoding]) -> None:
    kinds = {
        (one.method, c and (c.alpha, c.beta, c.gamma, c.skip))
        for one in encodings
        for c in (one.rpe_config,)
    }
    if len(kinds) > 1:
        raise Unsupported(
            "Queries, keys and values have encodings of different methods, coefficients or skip "
            "tokens, and one call uses one map of buckets. Give them the same configuration, as "
            "get_rpe_config does."
        )
