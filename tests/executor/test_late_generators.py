"""A block that draws from a random generator which the program replaces after its first steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchtrim.executor.registry import technique
from torchtrim.records.plan import Technique

SEED, OTHER = 1, 2
GLOBAL: Any = None


def of_torch(seed: int) -> Any:
    return torch.Generator().manual_seed(seed)


def noise(given: Any, x: Tensor) -> Tensor:
    if isinstance(given, random.Random):
        return x * given.random()
    return x * torch.rand(x.shape, generator=given)


class Block(nn.Module):
    def __init__(self, make: Callable[[int], Any]) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.own, self.held = make(SEED), SimpleNamespace(inner=make(SEED))
        self.several, self.listed = {"a": make(SEED)}, [make(SEED)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).tanh()
        return noise(self.drawn_from(), x) * x

    def drawn_from(self) -> Any:
        raise NotImplementedError


class OfAttribute(Block):
    def drawn_from(self) -> Any:
        return self.own

    def replace(self, new: Any) -> None:
        self.own = new


class OfObject(Block):
    def drawn_from(self) -> Any:
        return self.held.inner

    def replace(self, new: Any) -> None:
        self.held.inner = new


class OfDict(Block):
    def drawn_from(self) -> Any:
        return self.several["a"]

    def replace(self, new: Any) -> None:
        self.several["a"] = new


class OfList(Block):
    def drawn_from(self) -> Any:
        return self.listed[0]

    def replace(self, new: Any) -> None:
        self.listed[0] = new


class OfModule(Block):
    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__(make)
        self.replace(make(SEED))

    def drawn_from(self) -> Any:
        return GLOBAL

    def replace(self, new: Any) -> None:
        global GLOBAL
        GLOBAL = new


def closing_over(make: Callable[[int], Any]) -> Any:
    generator = make(SEED)

    class OfClosure(Block):
        def drawn_from(self) -> Any:
            return generator

        def replace(self, new: Any) -> None:
            nonlocal generator
            generator = new

    return OfClosure(make)


KINDS = (OfAttribute, OfObject, OfDict, OfList, OfModule, closing_over)


def gradients(
    make: Callable[[int], Any], kind: Callable[..., Any], *, planned: bool
) -> list[Tensor]:
    """The gradients of four steps; the generator is replaced after the second."""
    block = kind(make)
    if planned:
        plan = Technique(name="recompute", where=("Sequential.0",), options={})
        technique("recompute").apply({"Sequential": nn.Sequential(block)}, plan)
    x, found = torch.ones(4, 8), []
    for step in range(4):
        if step == 2:
            block.replace(make(OTHER))
        block.zero_grad()
        block(x).sum().backward()
        found.append(block.linear.weight.grad.clone())
    return found


@pytest.mark.parametrize("make", [of_torch, random.Random], ids=["torch", "Python"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_another_generator_is_rewound_too(make: Any, kind: Any) -> None:
    expected = gradients(make, kind, planned=False)
    assert all(map(torch.equal, expected, gradients(make, kind, planned=True)))
