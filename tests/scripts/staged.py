"""A script whose step is `loss_fn(model(x), y)`, with dropout and clipped gradients.

`--wrong` mixes samples; with `--dies` rank 1 does; `--sums` adds up losses, which micro-batches cannot.
"""

import os
import sys

import torch
from torch import nn

WORDS, WIDTH, LENGTH = 24, 16, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        if "--wrong" in sys.argv:
            x = x - x.mean(0, keepdim=True)
        return x + self.drop(self.mlp(self.norm(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def say(text):
    """A whole line at once: ranks share a pipe."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
loss_fn = nn.CrossEntropyLoss(reduction="sum" if "--sums" in sys.argv else "mean")
for step in range(8):
    if "--dies" in sys.argv and os.environ.get("RANK") == "1" and step == 1:
        os._exit(9)
    tokens = torch.randint(WORDS, (8, LENGTH + 1))
    optimizer.zero_grad()
    scores = model(tokens[:, :-1])
    loss = loss_fn(scores.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    say(f"step {step} loss {loss.item():.6f}")
saved = model.state_dict()
full = all(bool(one.abs().sum() > 0) for name, one in saved.items() if "weight" in name)
say(f"saved {full}")
