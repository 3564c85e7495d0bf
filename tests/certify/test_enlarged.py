"""Rounding that training makes larger from step to step is still rounding; a bug of the first step is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
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


def deep(*, fused: bool, fault: float = 0.0) -> TrainStep:
    """A model of many parameters; `fault` shrinks one bias after the last update that is compared."""
    torch.manual_seed(0)
    model = nn.Sequential(*(one for _ in range(12) for one in (nn.Linear(4, 4), nn.Tanh())))
    bias = model.get_parameter("14.bias")

    class Adam(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            if self.state[bias]["step"] >= 4:
                bias.data.mul_(1 - fault)
            return result

    optimizer = Adam(model.parameters(), 1e-3, fused=fused)
    return TrainStep(model, lambda net, x: net(x).square().mean(), optimizer, torch.randn(8, 4))


@pytest.mark.slow
def test_a_late_fault_beside_many_differences_that_round_is_seen() -> None:
    sound = torchtrim.verify(deep(fused=False), deep(fused=True))
    assert sound.verdict == "ROUNDING"
    found = torchtrim.verify(deep(fused=False), deep(fused=True, fault=1e-5))
    assert found.verdict == "NOT EQUAL"
    assert found.first_difference is not None
    assert found.first_difference.module == "Sequential.14.bias"
    assert found.first_difference.op == "parameter in step 4"


def test_what_the_other_draws_at_random_is_no_rounding() -> None:
    """Its perturbed runs lie as far apart as the two programs."""

    def step(size: float) -> TrainStep:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        own = torch.Generator()

        def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
            own.seed()
            result: torch.Tensor = net(x).square().mean()
            return result * (1 + size * torch.rand((), generator=own))

        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        return TrainStep(model, loss, optimizer, torch.randn(4, 8))

    found = torchtrim.verify(step(0.0), step(1e-5))
    assert found.verdict == "NOT EQUAL"
    assert "float64" in found.reason
