"""Replay under a gradient penalty: backward that is differentiated again saves what it unpacked."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchtrim import TrainStep, record
from torchtrim.records.plan import Technique
from torchtrim.step.from_profile import step_of
from torchtrim.step.simulate import simulate
from torchtrim.techniques.replay.technique import TECHNIQUE


class Critic(nn.Module):
    """Convolutions with leaky ReLUs called as functions, and a score."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8 * 256, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second):
            x = F.leaky_relu(layer(x), 0.2)
        return self.head(x.flatten(1))


def loss_of(critic: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Scores of true and false images, and a penalty on the gradient of those in between."""
    between = (0.3 * batch + 0.7 * batch.flip(0)).requires_grad_()
    scored = critic(between).sum()
    (slope,) = torch.autograd.grad(scored, between, create_graph=True)
    penalty = (slope.flatten(1).norm(2, 1) - 1).square().mean()
    loss: torch.Tensor = critic(batch.flip(0)).mean() - critic(batch).mean() + 10 * penalty
    return loss


def case() -> tuple[Critic, torch.Tensor]:
    torch.manual_seed(0)
    return Critic(), torch.randn(16, 1, 16, 16)


def step_with(critic: Critic, batch: torch.Tensor) -> TrainStep:
    return TrainStep(critic, loss_of, torch.optim.SGD(critic.parameters(), 0.01), batch)


def trained(critic: Critic, batch: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(critic.parameters(), 0.01)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(critic, batch).backward()
        optimizer.step()
    grads = [p.grad for p in critic.parameters() if p.grad is not None]
    return [*critic.state_dict().values(), *grads]


_PLACES = (
    "Critic:leaky_relu.0",
    "Critic:convolution.0,leaky_relu.0",
    "Critic:leaky_relu.0,convolution.1",
)


@pytest.mark.parametrize("where", _PLACES)
def test_calls_with_and_without_a_penalty_are_replayed_bit_for_bit(where: str) -> None:
    step = step_of(record(step_with(*case())))
    options = {option.where: option for option in TECHNIQUE.options(step)}
    edit = TECHNIQUE.edits(step, options[where])
    assert edit is not None
    predicted = simulate(step, [edit]).peak_bytes
    assert predicted < simulate(step).peak_bytes
    critic, batch = case()
    TECHNIQUE.apply({"Critic": critic}, Technique(name="replay", where=(where,)))
    assert simulate(step_of(record(step_with(critic, batch)))).peak_bytes <= predicted
    planned, (twin, _) = case()[0], case()
    TECHNIQUE.apply({"Critic": planned}, Technique(name="replay", where=(where,)))
    assert all(map(torch.equal, trained(planned, batch), trained(twin, batch)))
