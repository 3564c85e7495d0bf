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
    name: str = "one"
    parts: int = 1
    share: float = 1.0
    flips: bool = False
    rate: float = 1e-2


def step(way: Way) -> TrainStep:
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(way.name, nn.Linear(16, 48))
            self.two = nn.Sequential(Gelu() if way.function else nn.GELU(), nn.Linear(48, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one = self.get_submodule(way.name)
            if way.chunks:
                parts = zip(one.weight.chunk(3), one.bias.chunk(3), strict=True)
                x = torch.cat([F.linear(x, weight, bias) for weight, bias in parts], -1)
            else:
                x = one(x)
            return self.two.forward(x) if way.direct else self.two(x)

    net = Net()
    own = [*net.parameters()]
    groups = [
        {"params": own[:2], "weight_decay": 0.01},
        {"params": own[2:], "weight_decay": way.decay},
    ]
    optimizer = torch.optim.AdamW(groups if way.groups else own, way.rate, weight_decay=0.01)

    def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        parts = (x.flip(0) if way.flips else x).chunk(way.parts)
        found = sum((net(one).square().mean() for one in parts), x.new_zeros(()))
        return found * way.share

    return TrainStep(net, loss, optimizer, torch.randn(8, 16))


@pytest.mark.parametrize(
    ("way", "said"),
    [
        (Way(function=True), "first in attribute:Net.two.0.approximate"),
        (Way(chunks=True), "first in call:Net.one"),
        (Way(groups=True), ""),
        (Way(name="hidden"), "Net.one is Net.hidden in the other"),
        (Way(parts=2, share=0.5), "outputs are of another number of calls, and not compared"),
        (Way(rate=0.1**2), "first in hyperparameter:0.lr"),
    ],
)
def test_equal_numbers_are_equal(way: Way, said: str) -> None:
    found = torchtrim.verify(step(Way()), step(way), steps=1)
    assert found.verdict in ("BITWISE", "ROUNDING"), found.reason
    assert said in found.otherwise
    counted = any(one.partition(" ")[2].startswith("output") for one in found.compared)
    assert counted == (way.parts == 1)


def test_a_module_whose_forward_alone_is_called_is_a_difference() -> None:
    assert torchtrim.verify(step(Way()), step(Way(direct=True)), steps=1).verdict == "NOT EQUAL"


def test_a_setting_of_some_parameters_is_named() -> None:
    found = torchtrim.verify(step(Way()), step(Way(groups=True, decay=0.0)), steps=1)
    assert found.verdict == "NOT EQUAL"
    assert found.first_difference is not None
    assert "weight_decay" in found.first_difference.module


def test_a_name_does_not_hide_a_difference() -> None:
    found = torchtrim.verify(step(Way()), step(Way(name="hidden", decay=0.0, groups=True)), steps=1)
    assert found.verdict == "NOT EQUAL"
    found = torchtrim.verify(step(Way()), step(Way(name="hidden", share=1 + 1e-6)), steps=1)
    assert found.verdict == "NOT EQUAL"
    assert "gradient" in found.reason or "loss" in found.reason


def test_parts_of_a_batch_that_are_added_up_wrongly_are_a_difference() -> None:
    found = torchtrim.verify(step(Way()), step(Way(parts=2)), steps=1)
    assert found.verdict == "NOT EQUAL"


def test_outputs_in_another_order_are_a_difference_and_the_reason_says_what_agrees() -> None:
    found = torchtrim.verify(step(Way()), step(Way(flips=True)), steps=1)
    assert found.verdict == "NOT EQUAL"
    assert "losses, gradients and parameters agree" in found.reason
