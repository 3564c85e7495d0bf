"""Small models for pipelines, and one in stages in this process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from torchtrim.executor.swap import Swapped
from torchtrim.pipelines.lone import in_one_process
from torchtrim.records.pipeline import Pipeline, Schedule

WORDS, WIDTH, LENGTH, BATCH = 32, 16, 8, 8


class Block(nn.Module):
    """Attention and an MLP, each added to what goes in."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.dropout(self.proj(mixed.transpose(1, 2).reshape(batch, length, WIDTH)))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """As GPT-2 is built: embeddings, blocks in a list inside an inner model, and a head."""

    def __init__(self, depth: int = 4, dropout: float = 0.0, *, masked: bool = False) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "h": nn.ModuleList(Block(dropout) for _ in range(depth)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.masked = masked

    def forward(self, tokens: Tensor) -> Tensor:
        t: Any = self.transformer
        places = torch.arange(tokens.shape[1])
        x = t["wte"](tokens) + t["wpe"](places)
        mask = (places[:, None] >= places).expand(len(tokens), 1, -1, -1) if self.masked else None
        for block in t["h"]:
            x = block(x, mask)
        return self.lm_head(t["ln_f"](x))


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    """Tokens, and the tokens that follow."""
    made = torch.Generator().manual_seed(seed)
    shape = (BATCH, LENGTH)
    return torch.randint(WORDS, shape, generator=made), torch.randint(WORDS, shape, generator=made)


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens."""
    return cross_entropy(scores.view(-1, scores.size(-1)), targets.view(-1))


def pipeline(
    cuts: tuple[str, ...], schedule: Schedule, ranks: int, *, microbatches: int = 4
) -> Pipeline:
    """A plan of a pipeline."""
    return Pipeline(
        root="Model", cuts=cuts, schedule=schedule, ranks=ranks, microbatches=microbatches
    )


def staged(model: nn.Module, plan: Pipeline) -> nn.Module:
    """The model, in stages, all in this process."""
    Swapped(model, in_one_process(model, plan).wrap)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Those that there are, by name."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
