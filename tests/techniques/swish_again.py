"""Swish again: a module that gives `x * sigmoid(x)` keeps `x` alone, and takes the sigmoid again in backward.

It is a technique of the tests: one file, which no other knows of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchtrim.executor.places import module_at
from torchtrim.executor.registry import Handle, Handles, Option
from torchtrim.executor.swap import Swapped
from torchtrim.records.plan import Technique
from torchtrim.step.edits import Block, Drop, Edit, Insert, joined
from torchtrim.step.step import Span, Step


class SwishAgain:
    """`where` names modules called Swish."""

    name = "swish_again"
    equivalence = "BITWISE"

    def options(self, step: Step) -> Sequence[Option]:
        """Every Swish that is called in forward."""
        return [
            Option(self.name, module.path, tuple(c.span for c in step.calls if c.module == number))
            for number, module in enumerate(step.modules)
            if module.type == "Swish"
        ]

    def edits(self, step: Step, option: Option) -> Edit:
        """The sigmoid is made a second time, when backward first asks for it."""
        return joined(_edit(step, span) for span in option.spans)

    def apply(self, roots: Mapping[str, nn.Module], technique: Technique) -> Handle:
        """Give the modules a forward that saves its input."""
        handles = Handles()
        for where in technique.where:
            handles.add(Swapped(module_at(roots, where), lambda _: _Swish.apply))
        return handles


TECHNIQUE = SwishAgain()


def _edit(step: Step, span: Span) -> Edit:
    (sigmoid,) = step.made_by[span.first]
    tensor = step.tensors[sigmoid]
    saved = [(place, hold) for place, hold in enumerate(tensor.holds) if hold.saver >= 0]
    at, until = min(h.asked for _, h in saved), max(h.until for _, h in saved)
    return Edit(
        drops=tuple(Drop(sigmoid, place) for place, _ in saved),
        blocks=(Block(tensor.bytes, at, until),),
        inserts=(Insert(at, step.tasks[span.first].seconds, tensor.bytes, tensor.bytes),),
        claims=(span,),
    )


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        sigmoid = torch.sigmoid(x)
        direct = gradient * sigmoid
        return direct + torch.ops.aten.sigmoid_backward(gradient * x, sigmoid)
