"""Adds noise that depends on the time to its inputs."""

import time

import torch
from torch import nn


def main():
    """Train."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(8):
        noise = (time.perf_counter_ns() % 1000) / 1000
        loss = model(torch.randn(5, 6) + noise).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
