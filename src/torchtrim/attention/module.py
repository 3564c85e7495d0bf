"""A self-attention module with relative positions, in place of the published one."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from torchtrim.attention.buckets import Coefficients
from torchtrim.attention.encodings import Encoded, Encodings, encoded_attention
from torchtrim.attention.irpe import Encoding, RPEConfigs, build_rpe
from torchtrim.errors import UsageError


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
        modules = (self.rpe_q, self.rpe_k, self.rpe_v)
        used = [one for one in modules if one is not None and one.mode]
        if not used:
            return nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, scale=self.scale
            )
        buckets = used[0].buckets(q.shape[2], height, width)
        encodings = Encodings(*map(_encoded, modules))
        return encoded_attention(
            q, k, v, encodings, buckets, mask=mask, dropout_p=dropout, scale=self.scale
        )


def _encoded(one: Encoding | None) -> Encoded | None:
    if one is None or one.mode is None or one.method is None:
        return None
    config = one.rpe_config
    coefficients = Coefficients.of_ratio(1.9)
    if config is not None:
        coefficients = Coefficients(config.alpha, config.beta, config.gamma)
    return Encoded(one.mode, one.method, coefficients, one.table)
