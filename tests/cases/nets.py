"""Networks of kinds that the libraries of models lack, each small and with its kernels' own needs."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtrim.attention import RelativeAttention, get_rpe_config


class UNet(nn.Module):
    """Two levels down, two up, few channels on large images; a class for each pixel."""

    def __init__(self, width: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.first = self._twice(3, width)
        self.second = self._twice(width, 2 * width)
        self.third = self._twice(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.back2 = self._twice(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.back1 = self._twice(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def _twice(self, inner: int, outer: int) -> nn.Module:
        convolutions = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1)
        return nn.Sequential(convolutions[0], nn.ReLU(), convolutions[1], nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(F.max_pool2d(first, 2))
        third = self.third(F.max_pool2d(second, 2))
        second = self.back2(torch.cat([self.up2(third), second], 1))
        return self.head(self.back1(torch.cat([self.up1(second), first], 1)))


class Recurrent(nn.Module):
    """A language model of `nn.LSTM` or `nn.GRU`."""

    def __init__(self, kind: Any, width: int = 192, vocabulary: int = 4000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.cells = kind(width, width, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.cells(self.embedding(tokens))[0])


class Audio(nn.Module):
    """Strided convolutions over a wave, then over its features; a class for each wave."""

    def __init__(self, width: int = 32, classes: int = 35) -> None:
        super().__init__()
        widths = [1, width, width, 2 * width, 2 * width]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(a, b, 9, stride=2, padding=4), nn.BatchNorm1d(b), nn.GELU())
            for a, b in itertools.pairwise(widths)
        )
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(2))


class Video(nn.Module):
    """Convolutions over time and space."""

    def __init__(self, width: int = 12, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv3d(3, width, (3, 5, 5), stride=(1, 2, 2), padding=(1, 2, 2))
        self.norm = nn.BatchNorm3d(width)
        self.deep = nn.Conv3d(width, 2 * width, 3, padding=1)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool3d(F.relu(self.norm(self.stem(x))), (1, 2, 2))
        return self.head(F.relu(self.deep(x)).mean((2, 3, 4)))


class Autoencoder(nn.Module):
    """Strided convolutions down, transposed ones up; group norm and SiLU, as diffusion models have."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, width, 4, stride=2, padding=1),
            nn.GroupNorm(4, width),
            nn.SiLU(),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
        )
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1),
            nn.GroupNorm(4, width),
            nn.SiLU(),
            nn.ConvTranspose2d(width, 3, 3, padding=1),
            nn.Upsample(scale_factor=2, mode="bilinear"),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


class Encoder(nn.Module):
    """`nn.TransformerEncoder` over tokens, with torch's fast path in evaluation."""

    def __init__(self, width: int = 192, layers: int = 3, vocabulary: int = 4000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)))


class Relative(nn.Module):
    """Blocks of torchtrim's relative-position attention over image patches."""

    def __init__(self, width: int = 96, layers: int = 3, classes: int = 10) -> None:
        super().__init__()
        config = get_rpe_config(rpe_on="qkv", skip=0)
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.blocks = nn.ModuleList(
            RelativeAttention(width, 4, True, rpe_config=config) for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + block(norm(x))
        return self.head(x.mean(1))


class Autocast(nn.Module):
    """Another network under autocast to bfloat16."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x)
