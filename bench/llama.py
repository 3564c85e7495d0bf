"""A decoder of Llama 3's shape, by hand: grouped queries, rotary positions, gated feed-forward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Causal attention of `heads` queries over fewer keys and values."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.size = width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * self.size, bias=False)
        self.v = nn.Linear(width, groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        q, k = rotated(q, cosine, sine), rotated(k, cosine, sine)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(seen.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.before_attention = nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, heads, groups)
        self.before_hidden = nn.RMSNorm(width, eps=1e-5)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before_attention(x), cosine, sine)
        inner = self.before_hidden(x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))


class Llama(nn.Module):
    """The decoder; as it is, of Llama-3-8B's size: 8.03 billion parameters."""

    def __init__(
        self,
        words: int = 128_256,
        width: int = 4096,
        depth: int = 32,
        heads: int = 32,
        groups: int = 8,
        hidden: int = 14_336,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width, heads, groups, hidden) for _ in range(depth))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, words, bias=False)
        self._size = width // heads

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        cosine, sine = (part.to(x.dtype) for part in self._positions(ids))
        for layer in self.layers:
            x = layer(x, cosine, sine)
        return self.head(self.norm(x))

    def _positions(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        steps = torch.arange(0, self._size, 2, device=ids.device) / self._size
        places = torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32)
        angles = torch.outer(places, 500_000.0**-steps)
        return angles.cos(), angles.sin()


def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Queries or keys turned by their positions."""
    real, imaginary = x.chunk(2, -1)
    return torch.cat((real * cosine - imaginary * sine, imaginary * cosine + real * sine), -1)


def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Of the next word."""
    words = model(ids[:, :-1]).flatten(0, 1).float()
    return F.cross_entropy(words, ids[:, 1:].flatten())
