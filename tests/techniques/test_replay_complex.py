"""Replay of complex tensors: backward conjugates them without a copy, and every bit agrees."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from steps import train_step
from torchtrim import record
from torchtrim.executor.registry import Option
from torchtrim.records.plan import Technique
from torchtrim.step.from_profile import step_of
from torchtrim.step.simulate import simulate
from torchtrim.step.step import Step
from torchtrim.techniques.replay.technique import TECHNIQUE


class Exponentials(nn.Module):
    """Sums of complex exponentials over time, the kernel of a state space model."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.randn(8, 16, 2) / 8)
        self.weights = nn.Parameter(torch.randn(8, 16, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rates = torch.view_as_complex(self.rates)
        powers = torch.exp(rates.unsqueeze(-1) * torch.arange(x.shape[-1]) / x.shape[-1])
        weights = torch.view_as_complex(self.weights)
        return x * 2 * torch.einsum("hn,hnl->hl", weights, powers).real


class Scaled(nn.Module):
    """Complex products, and a magnitude, whose gradient conjugates nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8, 256, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        once = torch.complex(x, x + 1) * self.scale
        twice = torch.exp(once / 8) * once
        return (twice * self.scale).abs() + twice.real


MODELS = {"exponentials": Exponentials, "scaled": Scaled}


@functools.cache
def step_with(name: str) -> Step:
    return step_of(record(train_step(*model_of(name), "SGD")))


def model_of(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return MODELS[name](), torch.randn(8, 256)


def complex_options(name: str) -> list[Option]:
    return [
        one
        for one in TECHNIQUE.options(step_with(name))
        if "exp" in one.where or "mul" in one.where
    ]


def trained(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(batch).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_bit_agrees(name: str) -> None:
    step, options = step_with(name), complex_options(name)
    assert options
    for option in options:
        edit = TECHNIQUE.edits(step, option)
        if edit is None:
            continue
        (model, batch), (twin, _) = model_of(name), model_of(name)
        technique = Technique(name="replay", where=(option.where,))
        TECHNIQUE.apply({type(model).__name__: model}, technique)
        assert all(map(torch.equal, trained(model, batch), trained(twin, batch))), option.where


def test_backward_conjugates_without_a_copy() -> None:
    step = step_with("exponentials")
    size = 8 * 16 * 256 * 8  # Bytes of the powers, in complex64.
    edits = [TECHNIQUE.edits(step, one) for one in complex_options("exponentials")]
    peaks = [simulate(step, [edit]).peak_bytes for edit in edits if edit is not None]
    # Powers, their gradient, and the product of both; the copy was the fourth.
    assert min(peaks) < 3.3 * size < simulate(step).peak_bytes


@pytest.mark.parametrize("name", sorted(MODELS))
def test_what_is_predicted_is_measured(name: str) -> None:
    step = step_with(name)
    for option in complex_options(name):
        if (edit := TECHNIQUE.edits(step, option)) is not None:
            model, batch = model_of(name)
            technique = Technique(name="replay", where=(option.where,))
            TECHNIQUE.apply({type(model).__name__: model}, technique)
            measured = simulate(step_of(record(train_step(model, batch, "SGD")))).peak_bytes
            predicted = simulate(step, [edit]).peak_bytes
            assert measured <= predicted <= 1.06 * measured, option.where
