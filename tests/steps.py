"""Small training steps that several tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchtrim import Profile, TrainStep
from torchtrim.records.trial import Request, Trial
from torchtrim.workflows.optimize.fitting import Fitting


class Rereading(torch.autograd.Function):
    """A product whose backward asks for all that it saved once for each thing that it needs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        by_x = grads[0] @ ctx.saved_tensors[1]
        return by_x, grads[0].t() @ ctx.saved_tensors[0]


class Block(nn.Module):
    """Convolution, BatchNorm, in-place ReLU, dropout, and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.act(self.norm(self.conv(x))))


class ConvNet(nn.Module):
    """Blocks in a ModuleList between a stem and a head."""

    def __init__(self, width: int = 8, blocks: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def flat(width: int = 8, layers: int = 8) -> nn.Sequential:
    """Convolutions and ReLUs in one flat Sequential."""
    inner = [m for _ in range(layers) for m in (nn.Conv2d(width, width, 3, padding=1), nn.ReLU())]
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), *inner, nn.Conv2d(width, 5, 1)
    )


def encoder(width: int = 32, layers: int = 4) -> nn.TransformerEncoder:
    """A transformer encoder with dropout."""
    layer = nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def squared(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A loss of any output."""
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def images(size: int = 32, count: int = 8) -> torch.Tensor:
    """A batch of images."""
    return torch.randn(count, 3, size, size)


def train_step(model: nn.Module, batch: torch.Tensor, kind: str = "Adam") -> TrainStep:
    """A training step of the model with an optimizer of that kind."""
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3)
    return TrainStep(model, squared, optimizer, batch)


STEPS = {
    "blocks": lambda: train_step(ConvNet(), images()),
    "flat": lambda: train_step(flat(), images()),
    "encoder": lambda: train_step(encoder(), torch.randn(8, 48, 32)),
}


def quiet(_: str) -> None:
    """No progress."""


def fitting(step: TrainStep, steps: int = 2) -> Fitting:
    """A fitting that says nothing."""
    return Fitting(step, Request(steps=steps), quiet)


def trial(step: TrainStep) -> tuple[Trial, Profile]:
    """One run of the original, with its profile."""
    found = fitting(step).observe()
    assert found.profile is not None
    return found, found.profile
