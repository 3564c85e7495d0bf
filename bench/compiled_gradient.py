"""The gradient of a compiled model with dropout, beside central differences of its loss.

    python -m bench.compiled_gradient

A gradient along a direction is what the loss changes by, per step in that direction. Each loss starts
from one seed, so that its dropout masks are the same. `activation_memory_budget` draws them again in
backward at some budgets of torch 2.13, without a warning; plans of torchtrim do not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch import nn

from bench.machine import save
from torchtrim.compiled.apply import Applied
from torchtrim.compiled.graphs import Graphs
from torchtrim.compiled.planning import GraphPlanner

BUDGETS = (1.0, 0.5, 0.3, 0.1)
_STEP = 1e-5


class Layer(nn.Module):
    """A residual layer with dropout."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.shrink(F.gelu(self.grow(self.norm(x)))), 0.3, True)


class Case:
    """Four layers in float64, and their loss from a fixed seed."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Layer() for _ in range(4))).double()
        self.x = torch.randn(512, 32, dtype=torch.double)
        generator = torch.Generator().manual_seed(2)
        self.direction = [
            torch.randn(one.shape, dtype=one.dtype, generator=generator)
            for one in self.model.parameters()
        ]
        self.compiled: Callable[..., torch.Tensor] = torch.compile(self.model)

    def loss(self) -> torch.Tensor:
        """The loss, of the same masks each time."""
        torch.manual_seed(3)
        return self.compiled(self.x).square().mean()

    def gradient(self) -> float:
        """The gradient along the direction."""
        self.loss().backward()
        along = zip(self.model.parameters(), self.direction, strict=True)
        return sum(float((one.grad * by).sum()) for one, by in along if one.grad is not None)

    def difference(self) -> float:
        """The same by central differences of the loss."""
        return (self._at(_STEP) - self._at(-_STEP)) / (2 * _STEP)

    def _at(self, length: float) -> float:
        with torch.no_grad():
            for one, by in zip(self.model.parameters(), self.direction, strict=True):
                one.add_(by, alpha=length)
        loss = float(self.loss().detach())
        with torch.no_grad():
            for one, by in zip(self.model.parameters(), self.direction, strict=True):
                one.add_(by, alpha=-length)
        return loss


def checked(context: AbstractContextManager[Any]) -> dict[str, float]:
    """The gradient, the differences, and how far off it is."""
    with context:
        case = Case()
        gradient, difference = case.gradient(), case.difference()
    off = abs(gradient - difference) / abs(difference)
    return {"gradient": gradient, "differences": difference, "off": float(f"{off:.1e}")}


def plan(share: float) -> AbstractContextManager[Any]:
    """torchtrim's plan for a share of the peak."""
    graphs = Graphs()
    with graphs.watched():
        case = Case()
        graphs.begin()
        case.gradient()
    planner = GraphPlanner(graphs)
    choice = planner.plan(int(share * planner.own.peak_bytes)) or planner.lowest
    return Applied(choice.graphs).installed()


def main() -> None:
    """Each budget, and a plan."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    found: dict[str, Any] = {}
    for budget in BUDGETS:
        patched = torch._functorch.config.patch(activation_memory_budget=budget)
        found[f"activation_memory_budget {budget}"] = checked(patched)
    found["torch.compile"] = checked(nullcontext())
    for share in (0.8, 0.6):
        found[f"torchtrim, {share:.0%} of the peak"] = checked(plan(share))
    print(json.dumps(found, indent=1))
    save("compiled_gradient", {"found": found})


if __name__ == "__main__":
    main()
