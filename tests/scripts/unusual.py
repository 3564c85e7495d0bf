"""Scripts whose step is not that of `torch.optim` on an eager module; the first argument says which."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

kind = sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def train(run: Callable[..., Any], update: Callable[[], None], steps: int = 6) -> None:
    """Steps on random batches."""
    for _ in range(steps):
        model.zero_grad()
        run(torch.randn(16, 64)).square().mean().backward()
        update()


def by_hand() -> None:
    """What optimizers do, without one."""
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.1)


def elsewhere() -> None:
    """What a process of the script's own runs."""
    train(model, by_hand)


if __name__ == "__main__":
    if kind == "by-hand":
        train(model, by_hand)
    if kind == "compiled":
        train(
            torch.compile(model, mode="max-autotune"), torch.optim.SGD(model.parameters(), 0.1).step
        )
    if kind == "calls":
        model.eval()
        for _ in range(6):
            with torch.no_grad():
                model(torch.randn(16, 64))
    if kind == "processes":
        with torch.no_grad():
            model(torch.randn(16, 64))
        process = multiprocessing.get_context("fork").Process(target=elsewhere)
        process.start()
        process.join()
