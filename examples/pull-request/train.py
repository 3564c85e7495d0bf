"""A small training script whose pull requests must compute the same."""

from __future__ import annotations

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(20):
    x, y = torch.randn(16, 32), torch.randint(8, (16,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}")
