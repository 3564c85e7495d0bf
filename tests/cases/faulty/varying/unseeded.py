"""Seeds from the clock, so that no two runs have the same numbers."""

import time

import torch
from torch import nn


def main():
    """Train."""
    torch.manual_seed(time.time_ns())
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(8):
        loss = model(torch.randn(5, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
