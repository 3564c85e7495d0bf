"""Two optimizers that alternate."""

import torch
from torch import nn

torch.manual_seed(0)
maker = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16))
judge = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
of_maker = torch.optim.Adam(maker.parameters(), 1e-3)
of_judge = torch.optim.Adam(judge.parameters(), 1e-3)
for _ in range(1000):
    real = torch.randn(32, 16) + 2
    fake = maker(torch.randn(32, 8))
    loss = (
        nn.functional.softplus(-judge(real)).mean()
        + nn.functional.softplus(judge(fake.detach())).mean()
    )
    of_judge.zero_grad()
    loss.backward()
    of_judge.step()
    loss = nn.functional.softplus(-judge(fake)).mean()
    of_maker.zero_grad()
    loss.backward()
    of_maker.step()
