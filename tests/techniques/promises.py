"""Promises: it says that a module saves nothing for backward, and changes nothing, or makes it save more.

It is a technique of the tests, which lies: the planner has to find out by what is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from torchtrim.executor.places import module_at
from torchtrim.executor.registry import Handle, Handles, Option
from torchtrim.executor.swap import Forward, Swapped
from torchtrim.records.plan import Technique
from torchtrim.step.edits import Drop, Edit, Insert, joined
from torchtrim.step.step import Span, Step

WASTES = [False]


class Promises:
    """`where` names blocks."""

    name = "promises"
    equivalence = "BITWISE"

    def options(self, step: Step) -> Sequence[Option]:
        """Every block that is called in forward."""
        return [
            Option(self.name, module.path, tuple(c.span for c in step.calls if c.module == number))
            for number, module in enumerate(step.modules)
            if module.type == "Block"
        ]

    def edits(self, step: Step, option: Option) -> Edit:
        """Nothing that autograd saves of the module is kept, at next to no cost."""
        return joined(_edit(step, span) for span in option.spans)

    def apply(self, roots: Mapping[str, nn.Module], technique: Technique) -> Handle:
        """Change nothing, or keep one more copy of the result for backward."""
        handles = Handles()
        for where in technique.where if WASTES[0] else ():
            handles.add(Swapped(module_at(roots, where), _wasting))
        return handles


TECHNIQUE = Promises()


def _wasting(forward: Forward) -> Forward:
    return lambda x: _Kept.apply(forward(x))


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.clone())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _edit(step: Step, span: Span) -> Edit:
    drops = [
        Drop(number, place)
        for task in range(*span)
        for number in step.made_by[task]
        for place, hold in enumerate(step.tensors[number].holds)
        if hold.saver >= 0
    ]
    return Edit(drops=tuple(drops), inserts=(Insert(span.last, 1e-6, 0),), claims=(span,))
