"""A vision transformer of DeiT's layout with relative positions, its attention written out or not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attention import reference
from torchtrim.attention import RelativeAttention, get_rpe_config

SKIP = 1


class Table(nn.Module):
    """One published table."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.lookup_table_weight = nn.Parameter(torch.zeros(1, *shape))


class WrittenOut(nn.Module):
    """The published attention module, with q, k and v."""

    def __init__(self, dim: int, heads: int, grid: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)
        self.rpe_q, self.rpe_k = Table(dim // heads, 50), Table(dim // heads, 50)
        self.rpe_v = Table(50, dim // heads)
        self.ids = reference.published_ids("product", grid, grid, SKIP, 1.9)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        tables = (one.lookup_table_weight for one in (self.rpe_q, self.rpe_k, self.rpe_v))
        out = reference.original(q, k, v, self.ids, *tables)
        return self.proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and two layers."""

    def __init__(self, dim: int, heads: int, grid: int, ours: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        config = get_rpe_config(skip=SKIP, rpe_on="qkv")
        self.attn = (
            RelativeAttention(dim, heads, qkv_bias=True, rpe_config=config)
            if ours
            else WrittenOut(dim, heads, grid)
        )
        self.mlp = nn.Module()
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp.fc2(nn.functional.gelu(self.mlp.fc1(self.norm2(x))))


class DeiT(nn.Module):
    """Images (B, 3, size, size) to logits."""

    def __init__(
        self, *, size: int, patch: int, dim: int, depth: int, heads: int, classes: int, ours: bool
    ) -> None:
        super().__init__()
        grid = size // patch
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, dim, patch, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, grid * grid + 1, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads, grid, ours) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim, eps=1e-6), nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed.proj(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def both(**sizes: int) -> tuple[DeiT, DeiT]:
    """The model written out, with random tables, and ours with what it loads strictly."""
    torch.manual_seed(0)
    theirs, ours = DeiT(**sizes, ours=False), DeiT(**sizes, ours=True)
    with torch.no_grad():
        for name, one in theirs.named_parameters():
            if "lookup" in name or name in ("cls_token", "pos_embed"):
                one.normal_(std=0.2)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours
