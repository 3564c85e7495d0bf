"""Keeps times beside counters and averages: what it computes is the same in every run."""

import time

import torch
from torch import nn


class Meter:
    """Times of steps, and the average of a loss."""

    def __init__(self):
        self.began, self.times, self.average, self.count = time.time(), [], 0.0, 0

    def add(self, loss):
        """Note a step."""
        self.times.append(time.time() - self.began)
        self.average += (loss - self.average) / (self.count + 1)
        self.count += 1


def main():
    """Train."""
    torch.manual_seed(0)
    model, meter = nn.Linear(6, 2), Meter()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    average = {name: value.detach().clone() for name, value in model.named_parameters()}
    for _ in range(8):
        began = time.time()
        loss = model(torch.randn(5, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, value in model.named_parameters():
            average[name].lerp_(value.detach(), 0.1)
        meter.add(loss.item())
        elapsed = time.time() - began
        assert elapsed >= 0


if __name__ == "__main__":
    main()
