"""Small models of every kind, with a batch and a loss each, and the loop that trains them.

sample = SAMPLES["resnet"]()
optimizer = torch.optim.SGD(sample.model.parameters(), 0.1)
train(sample, optimizer, steps=2)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Sample:
    """A model with one batch. The loss is cross-entropy over the last dimension of the output."""

    model: nn.Module
    inputs: torch.Tensor
    targets: torch.Tensor
    autocast: bool = False

    def loss(self) -> torch.Tensor:
        """Forward and loss of the batch."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            output = self.model(self.inputs)
            return F.cross_entropy(output.flatten(0, -2), self.targets.flatten())


def train(sample: Sample, *optimizers: torch.optim.Optimizer, steps: int = 1) -> None:
    """The loop that everybody writes."""
    for _ in range(steps):
        loss = sample.loss()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(hidden)) + x)


class LastStep(nn.Module):
    """An LSTM and a linear layer on its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 24, 2, batch_first=True)
        self.head = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class UNet(nn.Module):
    """One level down, one up, and the skip between them; a class for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = F.relu(self.first(x))
        deep = F.relu(self.down(F.max_pool2d(skip, 2)))
        joined = torch.cat([self.up(deep), skip], 1)
        return self.head(joined).movedim(1, -1)


class TiedLM(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, width: int = 16, vocabulary: int = 50) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.1, batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embedding(tokens)))


class Checkpointed(nn.Module):
    """Linear blocks, each recomputed in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class InPlace(nn.Module):
    """Writes into its own tensors wherever it can."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 32)
        self.second = nn.Linear(32, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.first(x), inplace=True)
        table = torch.zeros(hidden.shape[0], 32)
        table[:, ::2] = self.second(hidden)[:, ::2]
        table.mul_(2).add_(1)
        return self.head(F.silu(table, inplace=True))


def mlp() -> Sample:
    model = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 4))
    return Sample(model, torch.randn(6, 10), torch.randint(4, (6,)))


def encoder(width: int = 16, *, autocast: bool = False) -> Sample:
    layer = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Sample(model, torch.randn(2, 8, width), torch.randint(width, (2, 8)), autocast)


def resnet() -> Sample:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        ResidualBlock(8),
        nn.MaxPool2d(2),
        ResidualBlock(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    return Sample(model, torch.randn(4, 3, 16, 16), torch.randint(5, (4,)))


def groupnorm() -> Sample:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 7 * 7, 5),
    )
    return Sample(model, torch.randn(4, 3, 16, 16), torch.randint(5, (4,)))


def lstm() -> Sample:
    return Sample(LastStep(), torch.randn(4, 9, 12), torch.randint(5, (4,)))


def unet() -> Sample:
    return Sample(UNet(), torch.randn(2, 3, 16, 16), torch.randint(4, (2, 16, 16)))


def tied() -> Sample:
    return Sample(TiedLM(), torch.randint(50, (2, 8)), torch.randint(50, (2, 8)))


def checkpointed(*, reentrant: bool = False) -> Sample:
    return Sample(Checkpointed(reentrant), torch.randn(8, 16), torch.randint(16, (8,)))


def inplace() -> Sample:
    return Sample(InPlace(), torch.randn(6, 10), torch.randint(4, (6,)))


SAMPLES: dict[str, Callable[[], Sample]] = {
    "mlp": mlp,
    "encoder": encoder,
    "encoder under autocast": lambda: encoder(autocast=True),
    "resnet": resnet,
    "groupnorm": groupnorm,
    "lstm": lstm,
    "unet": unet,
    "tied": tied,
    "checkpointed": checkpointed,
    "checkpointed reentrant": lambda: checkpointed(reentrant=True),
    "inplace": inplace,
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9),
    "adam foreach": lambda parameters: torch.optim.Adam(parameters, 1e-3, foreach=True),
    "adam single": lambda parameters: torch.optim.Adam(parameters, 1e-3, foreach=False),
    "adam fused": lambda parameters: torch.optim.Adam(parameters, 1e-3, fused=True),
}
