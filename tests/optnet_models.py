"""The networks on which OptNet was tested and measured, as its `models.lua` describes them.

Its ResNets have no BatchNorm but a multiplication by one, and its dropout is left out
(https://github.com/fmassa/optimize-net). Each entry of `NETWORKS` gives a model and one sample.

model, sample = NETWORKS["vgg-A"]()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Tensor, ...]]
VGG = {
    "A": (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0),
    "B": (64, 64, 0, 128, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0),
    "D": (64, 64, 0, 128, 128, 0, *[256] * 3, 0, *[512] * 3, 0, *[512] * 3, 0),
}


class Times(nn.Module):
    """Multiplication by a number."""

    def __init__(self, number: float = 1) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x * self.number


class Branches(nn.Module):
    """Each branch gets the same input; results are joined along the second dimension."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Residual(nn.Module):
    """What goes around is added to what goes through, in place."""

    def __init__(self, through: nn.Module, around: nn.Module) -> None:
        super().__init__()
        self.through, self.around = through, around

    def forward(self, x: Tensor) -> Tensor:
        return self.through(x).add_(self.around(x))


def conv(inside: int, outside: int, size: int = 3, stride: int = 1, pad: int = 0) -> nn.Module:
    """A convolution and a ReLU in place."""
    return nn.Sequential(nn.Conv2d(inside, outside, size, stride, pad), nn.ReLU(inplace=True))


def classifier(*widths: int, between: Callable[[], nn.Module]) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside), between()]
    return nn.Sequential(*layers[:-1], nn.LogSoftmax(1))


def alexnet() -> Made:
    """Two branches, as on two GPUs."""

    def branch() -> nn.Module:
        return nn.Sequential(
            conv(3, 48, 11, 4, 2),
            nn.MaxPool2d(3, 2),
            conv(48, 128, 5, 1, 2),
            nn.MaxPool2d(3, 2),
            conv(128, 192, 3, 1, 1),
            conv(192, 192, 3, 1, 1),
            conv(192, 128, 3, 1, 1),
            nn.MaxPool2d(3, 2),
        )

    top = classifier(9216, 4096, 4096, 1000, between=partial(nn.Threshold, 0, 1e-6))
    return nn.Sequential(Branches(branch(), branch()), top), (torch.rand(1, 3, 224, 224),)


def vgg(kind: str = "A") -> Made:
    layers: list[nn.Module] = []
    width = 3
    for wide in VGG[kind]:
        layers.append(conv(width, wide, 3, 1, 1) if wide else nn.MaxPool2d(2))
        width = wide or width
    top = classifier(25088, 4096, 4096, 1000, between=partial(nn.Threshold, 0, 1e-6))
    return nn.Sequential(*layers, top), (torch.rand(1, 3, 224, 224),)


def inception(
    width: int, one: int, three: Sequence[int], double: Sequence[int], pool: str, after: int
) -> nn.Module:
    """Branches of 1x1, 3x3, twice 3x3 and pooling; `one` or `after` 0 leaves that convolution out."""
    branches: list[nn.Module] = [conv(width, one, 1)] if one else []
    branches.append(nn.Sequential(conv(width, three[0], 1), conv(three[0], three[1], 3, 1, 1)))
    first, second = double
    branches.append(
        nn.Sequential(
            conv(width, first, 1), conv(first, second, 3, 1, 1), conv(second, second, 3, 1, 1)
        )
    )
    kind = nn.MaxPool2d if pool == "max" else nn.AvgPool2d
    pooled: list[nn.Module] = [nn.ZeroPad2d(1), kind(3, 1, ceil_mode=True)]
    branches.append(nn.Sequential(*pooled, *([conv(width, after, 1)] if after else [])))
    return Branches(*branches)


def googlenet() -> Made:
    """With its second classifier, the results of both side by side."""
    features = nn.Sequential(
        conv(3, 64, 7, 2, 3),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        conv(64, 64, 1),
        conv(64, 192, 3, 1, 1),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        inception(192, 64, (64, 64), (64, 96), "avg", 32),
        inception(256, 64, (64, 96), (64, 96), "avg", 64),
        inception(320, 0, (128, 160), (64, 96), "max", 0),
        nn.Conv2d(576, 576, 2, 2),
        inception(576, 224, (64, 96), (96, 128), "avg", 128),
        inception(576, 192, (96, 128), (96, 128), "avg", 128),
        inception(576, 160, (128, 160), (128, 160), "avg", 96),
        inception(576, 96, (128, 192), (160, 192), "avg", 96),
    )
    main = nn.Sequential(
        inception(576, 0, (128, 192), (192, 256), "max", 0),
        nn.Conv2d(1024, 1024, 2, 2),
        inception(1024, 352, (192, 320), (160, 224), "avg", 128),
        inception(1024, 352, (192, 320), (192, 224), "max", 128),
        nn.AvgPool2d(7, 1),
        classifier(1024, 1000, between=nn.ReLU),
    )
    second = nn.Sequential(
        nn.AvgPool2d(5, 3, ceil_mode=True),
        nn.Conv2d(576, 128, 1),
        classifier(2048, 768, 1000, between=nn.ReLU),
    )
    return nn.Sequential(features, Branches(main, second)), (torch.rand(1, 3, 224, 224),)


def _around(inside: int, outside: int, stride: int, *more: nn.Module) -> nn.Module:
    if inside == outside:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inside, outside, 1, stride), *more)


def _block(inside: int, outside: int, stride: int) -> nn.Module:
    through = nn.Sequential(
        nn.Conv2d(inside, outside, 3, stride, 1),
        Times(),
        nn.ReLU(inplace=True),
        nn.Conv2d(outside, outside, 3, 1, 1),
        Times(),
    )
    around = _around(inside, outside, stride, Times())
    return nn.Sequential(Residual(through, around), nn.ReLU(inplace=True))


def _preblock(inside: int, outside: int, stride: int) -> nn.Module:
    through = nn.Sequential(
        nn.Conv2d(inside, outside, 3, stride, 1),
        Times(),
        nn.ReLU(inplace=True),
        nn.Conv2d(outside, outside, 3, 1, 1),
    )
    residual = Residual(through, _around(inside, outside, stride))
    return nn.Sequential(Times(), nn.ReLU(inplace=True), residual)


def _cifar(depth: int, block: Callable[[int, int, int], nn.Module], *ends: nn.Module) -> Made:
    layers: list[nn.Module] = []
    width = 16
    for wide in (16, 32, 64):
        for number in range((depth - 2) // 6):
            layers.append(block(width, wide, 2 if wide > 16 and not number else 1))
            width = wide
    top = (nn.AvgPool2d(8, 1), nn.Flatten(), nn.Linear(64, 10))
    return nn.Sequential(*layers, *ends, *top), (torch.rand(1, 3, 32, 32),)


def resnet(depth: int) -> Made:
    model, sample = _cifar(depth, _block)
    return nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), Times(), nn.ReLU(inplace=True), model), sample


def preresnet(depth: int) -> Made:
    model, sample = _cifar(depth, _preblock, Times(), nn.ReLU(inplace=True))
    return nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), model), sample


class Parallel(nn.Module):
    """Each branch gets an input of its own; `join` makes one of their results."""

    def __init__(self, join: Callable[..., Any], *branches: nn.Module) -> None:
        super().__init__()
        self.branches, self.join = nn.ModuleList(branches), join

    def forward(self, *inputs: Tensor) -> Any:
        return self.join(*(b(x) for b, x in zip(self.branches, inputs, strict=True)))


class Several(nn.Module):
    """Each branch gets the same input; `join` makes one of their results, or they are all returned."""

    def __init__(self, join: Callable[..., Any], *branches: nn.Module) -> None:
        super().__init__()
        self.branches, self.join = nn.ModuleList(branches), join

    def forward(self, x: Tensor) -> Any:
        return self.join(*(branch(x) for branch in self.branches))


def basic_parallel() -> Made:
    second = nn.Sequential(nn.Linear(2, 1), nn.Sigmoid(), nn.Linear(1, 1))
    joined = Parallel(lambda a, b: torch.cat((a, b), 1), nn.Linear(2, 2), second)
    model = Then(joined, nn.Sequential(nn.Linear(3, 2), nn.ReLU(inplace=True)))
    return model, (torch.rand(2, 2), torch.rand(2, 2))


class Then(nn.Module):
    """One module after another, the first of several inputs."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, *inputs: Tensor) -> Any:
        return self.second(self.first(*inputs))


def basic_conv() -> Made:
    model = nn.Sequential(nn.Conv2d(1, 1, 3, 1, 1), nn.Flatten(), nn.Linear(1024, 100))
    return model, (torch.rand(1, 1, 32, 32),)


def basic_deep_conv() -> Made:
    convolutions = [conv(1, 1, 3, 1, 1) for _ in range(4)]
    top = (nn.Flatten(), nn.Linear(1024, 100), nn.ReLU(inplace=True), nn.Linear(100, 10))
    return nn.Sequential(*convolutions, *top), (torch.rand(1, 1, 32, 32),)


class Unpooling(nn.Module):
    """Pools twice, and takes the places of the maxima back up: a plan must keep those."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(conv(1, 1, 3, 1, 1) for _ in range(3))
        self.up = nn.ModuleList((conv(1, 1, 3, 1, 1), nn.Conv2d(1, 1, 3, 1, 1)))

    def forward(self, x: Tensor) -> Tensor:
        x, first = F.max_pool2d(self.down[0](x), 2, return_indices=True)
        x, second = F.max_pool2d(self.down[1](x), 2, return_indices=True)
        x = self.up[0](F.max_unpool2d(self.down[2](x), second, 2))
        return self.up[1](F.max_unpool2d(x, first, 2))


def basic_unpooling() -> Made:
    return Unpooling(), (torch.rand(1, 1, 32, 32),)


def siamese() -> Made:
    """Two branches that share their weights, and the distance of what they say."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Conv2d(1, 1, 3, 1, 1), nn.ReLU()]
    branch = nn.Sequential(*layers, nn.Flatten())
    model = Parallel(nn.PairwiseDistance(2), branch, branch)
    return model, (torch.rand(1, 1, 32, 32), torch.rand(1, 1, 32, 32))


class Mixed(nn.Module):
    """One of three results times the sum of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(1, 2)

    def forward(self, one: Tensor, two: Tensor, three: Tensor) -> Tensor:
        return self.widen(one) * (two + three)


def basic_concat() -> Made:
    relu = partial(nn.ReLU, inplace=True)
    branches = (
        nn.Sequential(nn.Linear(2, 1), relu(), nn.Linear(1, 1)),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
        nn.Sequential(nn.Linear(2, 3), relu(), nn.Linear(3, 2)),
    )
    return Several(Mixed(), *branches), (torch.rand(2, 2),)


def basic_multi_output() -> Made:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(2, 2), nn.ReLU()]
    heads = Several(lambda *all: all, *(nn.Linear(2, 2) for _ in range(3)))
    return nn.Sequential(*layers, heads), (torch.rand(2, 2),)


NETWORKS: dict[str, Callable[[], Made]] = {
    "basic parallel": basic_parallel,
    "basic conv": basic_conv,
    "basic deep conv": basic_deep_conv,
    "basic unpooling": basic_unpooling,
    "siamese": siamese,
    "basic concat": basic_concat,
    "basic multi output": basic_multi_output,
    "alexnet": alexnet,
    "vgg-A": vgg,
    "googlenet": googlenet,
    **{f"resnet-{depth}": partial(resnet, depth) for depth in (20, 32, 56, 110)},
    **{f"preresnet-{depth}": partial(preresnet, depth) for depth in (20, 32, 56, 110)},
}
