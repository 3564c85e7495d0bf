"""The gradient of a compiled model with dropout, beside central differences of its loss.

    python -m bench.compiled_gradient [MODEL ...]

A gradient along a direction is what the loss changes by, per step in that direction. Each loss starts
from one seed, so that its dropout masks are the same. `activation_memory_budget` draws them again in
backward at some budgets of torch 2.13, without a warning; plans of torchtrim do not. The budgets are tried
on the residual layers.
"""

from __future__ import annotations

import argparse
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

from bench.compiled_models import LENGTH, T5, WORDS, Block, Sample, Text
from bench.machine import save, saved
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


def _text(model: nn.Module) -> Sample:
    tokens = torch.randint(WORDS, (2, 2, LENGTH))
    return Sample(model, (tokens[0], tokens[1]))


CASES: dict[str, Callable[[], Sample]] = {
    "residual layers": lambda: Sample(
        nn.Sequential(*(Layer() for _ in range(4))), (torch.randn(512, 32, dtype=torch.double),)
    ),
    "gpt": lambda: _text(Text(lambda: Block(p=0.1, causal=True), 2, 0.1)),
    "t5": lambda: _text(T5(layers=1)),
}


class Case:
    """A model in float64, and its loss from a fixed seed."""

    def __init__(self, name: str) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        sample = CASES[name]()
        self.model, self.batch = sample.model.double(), sample.batch
        generator = torch.Generator().manual_seed(2)
        self.direction = [
            torch.randn(one.shape, dtype=one.dtype, generator=generator)
            for one in self.model.parameters()
        ]
        self.compiled: Callable[..., torch.Tensor] = torch.compile(self.model)

    def loss(self) -> torch.Tensor:
        """The loss, of the same masks each time."""
        torch.manual_seed(3)
        return self.compiled(*self.batch).square().mean()

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


def checked(name: str, context: AbstractContextManager[Any]) -> dict[str, float]:
    """The gradient, the differences, and how far off it is."""
    with context:
        case = Case(name)
        gradient, difference = case.gradient(), case.difference()
    off = abs(gradient - difference) / abs(difference)
    return {"gradient": gradient, "differences": difference, "off": float(f"{off:.1e}")}


def plan(name: str, share: float) -> tuple[float, AbstractContextManager[Any]]:
    """torchtrim's plan for a share of the peak, or for the lowest that it finds, and that share."""
    graphs = Graphs()
    with graphs.watched():
        case = Case(name)
        graphs.begin()
        case.gradient()
    planner = GraphPlanner(graphs)
    choice = planner.plan(int(share * planner.own.peak_bytes)) or planner.lowest
    reached = choice.simulated.peak_bytes / planner.own.peak_bytes
    return reached, Applied(choice.graphs).installed()


def found_for(name: str) -> dict[str, dict[str, float]]:
    """Each budget, torch's own, and plans."""
    found = {"torch.compile": checked(name, nullcontext())}
    for budget in BUDGETS if name == "residual layers" else ():
        patched = torch._functorch.config.patch(activation_memory_budget=budget)
        found[f"activation_memory_budget {budget}"] = checked(name, patched)
    for share in (0.8, 0.6) if name == "residual layers" else (0.6,):
        reached, planned = plan(name, share)
        found[f"torchtrim, {reached:.0%} of the peak"] = checked(name, planned)
    return found


def main() -> None:
    """The named models, or all; keeps the results of the others."""
    parser = argparse.ArgumentParser(prog="python -m bench.compiled_gradient")
    parser.add_argument("models", nargs="*", choices=[*CASES, []])
    options = parser.parse_args()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    found = saved("compiled_gradient").get("found", {})
    for name in options.models or CASES:
        found[name] = found_for(name)
        print(name, json.dumps(found[name], indent=1), flush=True)
        save("compiled_gradient", {"found": found})


if __name__ == "__main__":
    main()
