"""Programs that are built otherwise and compute the same numbers are equal, and the reason says so."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchtrim
from torchtrim import TrainStep


class Gelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x)


class Way(NamedTuple):
    """How a program is built."""

    function: bool = False
    chunks: bool = False
    groups: bool = False
    direct: bool = False
    decay: float = 0.01


def step(way: Way) -> TrainStep:
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(16, 48)
            self.two = nn.Sequential(Gelu() if way.function else nn.GELU(), nn.Linear(48, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if way.chunks:
                parts = zip(self.one.weight.chunk(3), self.one.bias.chunk(3), strict=True)
                x = torch.cat([F.linear(x, weight, bias) for weight, bias in parts], -1)
            else:
                x = self.one(x)
            return self.two.forward(x) if way.direct else self.two(x)

    net = Net()
    own = [*net.parameters()]
    groups = [
        {"params": own[:2], "weight_decay": 0.01},
        {"params": own[2:], "weight_decay": way.decay},
    ]
    optimizer = torch.optim.AdamW(groups if way.groups else own, 1e-2, weight_decay=0.01)
    return TrainStep(net, lambda net, x: net(x).square().mean(), optimizer, torch.randn(8, 16))


@pytest.mark.parametrize(
    ("way", "said"),
    [
        (Way(function=True), "built otherwise, first in attribute:Net.two.0.approximate"),
        (Way(chunks=True), "built otherwise, first in call:Net.one"),
        (Way(groups=True), ""),
    ],
)
def test_equal_numbers_are_equal(way: Way, said: str) -> None:
    found = torchtrim.verify(step(Way()), step(way), steps=1)
    assert found.verdict in ("BITWISE", "ROUNDING"), found.reason
    assert said in found.reason


def test_a_module_whose_forward_alone_is_called_is_a_difference() -> None:
    assert torchtrim.verify(step(Way()), step(Way(direct=True)), steps=1).verdict == "NOT EQUAL"


def test_a_setting_of_some_parameters_is_named() -> None:
    found = torchtrim.verify(step(Way()), step(Way(groups=True, decay=0.0)), steps=1)
    assert found.verdict == "NOT EQUAL"
    assert found.first_difference is not None
    assert "weight_decay" in found.first_difference.module
