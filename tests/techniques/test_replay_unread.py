"""Replay of graphs that the script drops without a backward: their saved tensors are dropped, exactly."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from steps import train_step
from torchtrim import record
from torchtrim.errors import ApplyFailed
from torchtrim.executor.registry import Handle, Option
from torchtrim.records.plan import Technique
from torchtrim.step.from_profile import step_of
from torchtrim.step.simulate import simulate
from torchtrim.step.step import Step
from torchtrim.techniques.replay.technique import TECHNIQUE


class Codebook(nn.Module):
    """Returns the nearest codes, and distances of which its caller uses none. `learns`: codes move."""

    def __init__(self, learns: bool) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(128, 16))
        self.learns = learns

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes = self.codes.detach()
        products = (x @ codes.t()) * -2
        squares = x.square().sum(1, keepdim=True) + codes.square().sum(1)
        distances = -(squares + products).clamp(min=1e-8).sqrt()
        nearest = codes[distances.argmax(1)]
        if self.learns:
            self.codes.data.lerp_(x.detach()[:128], 0.1)
        return nearest, distances


class Quantized(nn.Module):
    """Layers around a codebook. `far`: backward runs through the distances too."""

    def __init__(self, *, learns: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.codebook, self.far = Codebook(learns), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        nearest, distances = self.codebook(hidden)
        made = self.last(hidden + (nearest - hidden).detach())
        return made + distances.mean() if self.far else made


def unread(step: Step) -> list[Option]:
    return [one for one in TECHNIQUE.options(step) if one.settings == (("unread", True),)]


def applied(model: Quantized, option: Option) -> Handle:
    technique = Technique(name="replay", where=(option.where,), options=dict(option.settings))
    return TECHNIQUE.apply({"Quantized": model}, technique)


def option_of(model: Quantized, batch: torch.Tensor) -> Option:
    (option,) = unread(step_of(record(train_step(copy.deepcopy(model), batch, "SGD"))))
    return option


def quantized(*, learns: bool = True) -> tuple[Quantized, torch.Tensor]:
    torch.manual_seed(0)
    return Quantized(learns=learns), torch.randn(512, 16)


def trained(model: Quantized, batch: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(batch).square().mean().backward()
        optimizer.step()
    return [
        *model.state_dict().values(),
        *(p.grad for p in model.parameters() if p.grad is not None),
    ]


@pytest.mark.parametrize("learns", [True, False])
def test_what_no_backward_reads_is_dropped_as_predicted(learns: bool) -> None:
    model, batch = quantized(learns=learns)
    twin = copy.deepcopy(model)
    step = step_of(record(train_step(copy.deepcopy(model), batch, "SGD")))
    (option,) = unread(step)
    assert "Quantized.codebook:" in option.where
    plan = Technique(name="replay", where=(option.where,), options=dict(option.settings))
    assert "a graph that the script dropped" in TECHNIQUE.settled(step, plan).assumes[0]
    edit = TECHNIQUE.edits(step, option)
    assert edit is not None
    predicted = simulate(step, [edit]).peak_bytes
    assert predicted < 0.8 * simulate(step).peak_bytes
    handle = applied(model, option)
    again = copy.deepcopy(model)
    applied(again, option)
    measured = simulate(step_of(record(train_step(again, batch, "SGD")))).peak_bytes
    assert predicted == pytest.approx(measured, rel=1e-3)
    assert all(map(torch.equal, trained(model, batch), trained(twin, batch)))
    handle.revert()


def test_a_later_backward_through_it_reruns_what_has_not_changed() -> None:
    model, batch = quantized(learns=False)
    twin = copy.deepcopy(model)
    applied(model, option_of(model, batch))
    model.far = twin.far = True
    assert all(map(torch.equal, trained(model, batch), trained(twin, batch)))


def test_a_later_backward_through_it_stops_before_a_gradient_is_wrong() -> None:
    model, batch = quantized()
    applied(model, option_of(model, batch))
    trained(model, batch)
    model.far = True
    with pytest.raises(ApplyFailed, match="no step ran backward through"):
        trained(model, batch)


def test_what_another_backward_reads_is_not_unread() -> None:
    model, batch = quantized()
    model.far = True
    assert not unread(step_of(record(train_step(model, batch, "SGD"))))
