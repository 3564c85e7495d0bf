"""Rounding that training makes larger from step to step is still rounding; a bug of the first step is not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import torchtrim
from torchtrim import TrainStep

Update = Callable[[torch.Tensor], torch.Tensor]


def chaotic(update: Update) -> TrainStep:
    """A model whose buffer goes through a logistic map, which doubles what differs with each pass."""

    class Map(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("state", torch.rand(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                for _ in range(8):
                    self.state.copy_(update(self.state))
            return self.layer(x) * self.state

    torch.manual_seed(0)
    model = Map()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return TrainStep(model, lambda net, x: net(x).square().mean(), optimizer, torch.randn(4, 8))


def test_rounding_that_grows_is_rounding() -> None:
    certificate = torchtrim.verify(
        chaotic(lambda x: 3.99 * x * (1 - x)), chaotic(lambda x: 3.99 * x - 3.99 * x * x)
    )
    assert certificate.largest_difference is not None
    assert certificate.largest_difference > 1e-2
    assert certificate.verdict == "ROUNDING"


def test_what_is_wrong_at_once_is_not() -> None:
    certificate = torchtrim.verify(
        chaotic(lambda x: 3.99 * x * (1 - x)), chaotic(lambda x: 3.9 * x * (1 - x))
    )
    assert certificate.verdict == "NOT EQUAL"
