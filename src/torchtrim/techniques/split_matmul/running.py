"""Runs a module in parts of its rows, and again in backward."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from torchtrim.errors import ApplyFailed
from torchtrim.executor.autograd import casting, only_once
from torchtrim.executor.failing import note
from torchtrim.executor.ordinals import unnumbered
from torchtrim.executor.swap import Swapped, is_of_another

Forward = Callable[..., Any]


def split(where: str, module: nn.Module, parts: int) -> Swapped:
    """Give a module a forward in parts. Raises `ApplyFailed` for a module whose rows may interact."""
    for path, inner in module.named_modules():
        place = f"{where}.{path}".rstrip(".")
        if isinstance(inner, (_NormBase, nn.MultiheadAttention)):
            raise _refused(place, f"is a {type(inner).__name__}, whose rows interact")
        if isinstance(inner, _DropoutNd) and inner.training and inner.p > 0:
            raise _refused(place, "draws random numbers, which would differ in parts")
        if inner._forward_hooks or inner._forward_pre_hooks:
            raise _refused(place, "has hooks, which would see a part at a time")
    return Swapped(module, lambda forward: _in_parts(where, module, forward, parts))


def _refused(where: str, why: str) -> ApplyFailed:
    return ApplyFailed(f"`{where}` {why}, so split_matmul cannot run it in parts. Plan again.")


def _in_parts(where: str, module: nn.Module, forward: Forward, parts: int) -> Forward:
    if is_of_another(forward, module):
        return forward

    def call(*args: Any, **kwargs: Any) -> Any:
        given = args[0] if len(args) == 1 and not kwargs else None
        graded = torch.is_grad_enabled()
        if not graded or not isinstance(given, Tensor) or given.dim() < 2:
            return forward(*args, **kwargs)
        owned = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if prod(given.shape[:-1]) < parts or not (given.requires_grad or owned):
            return forward(given)
        try:
            return _RowParts.apply(forward, parts, given, *owned)  # type: ignore[no-untyped-call]
        except ApplyFailed as error:
            note(error, where)
            raise

    return call


class _RowParts(torch.autograd.Function):
    """A module's forward, one part of the rows at a time; only its input is saved."""

    @staticmethod
    def forward(ctx: Any, forward: Forward, parts: int, given: Tensor, *owned: Tensor) -> Tensor:
        ctx.again, ctx.cast = forward, casting(given.device.type)
        count = prod(given.shape[:-1])
        size = -(-count // parts)
        ctx.spans = [(at, min(at + size, count)) for at in range(0, count, size)]
        ctx.save_for_backward(given, *owned)
        with unnumbered() as as_before:
            rows, whole = _rows(given), None
            for first, last in ctx.spans:
                part = rows[..., first:last, :]
                with as_before(first == 0):
                    made = forward(part)
                del part
                if whole is None:
                    whole = _empty_result(made, rows, last - first)
                whole[first:last] = made.view(last - first, -1)
                del made
            assert whole is not None
            return whole.view(*given.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        only_once("split_matmul")
        given, *owned = ctx.saved_tensors
        rows, comes = _rows(given.detach()), gradient.reshape(-1, gradient.shape[-1])
        wanted = ctx.needs_input_grad[2]
        of_given = torch.zeros_like(rows) if wanted else None
        sums: list[Tensor | None] = [None] * len(owned)
        for first, last in ctx.spans:
            part = rows[..., first:last, :].requires_grad_(wanted)
            with torch.enable_grad(), ctx.cast():
                made = ctx.again(part)
            edge, comes_here = get_gradient_edge(made), comes[first:last].view(made.shape)
            del made
            inputs = [part, *owned] if wanted else owned
            found: list[Tensor | None] = [
                *torch.autograd.grad(edge, inputs, comes_here, allow_unused=True)
            ]
            if of_given is not None and found[0] is not None:
                of_given[..., first:last, :].copy_(found[0])
            del found[: len(found) - len(owned)]
            _add(sums, found)
        whole = of_given.view(given.shape) if of_given is not None else None
        return None, None, whole, *sums


def _add(sums: list[Tensor | None], found: list[Tensor | None]) -> None:
    """Add a part's gradients of parameters, and free them."""
    for number in range(len(sums)):
        one, known = found[number], sums[number]
        found[number] = None
        sums[number] = one if known is None else known if one is None else known.add_(one)


def _rows(given: Tensor) -> Tensor:
    """Return a view with the same number of dimensions, and all rows in the last but one."""
    return given.reshape(*(1,) * (given.dim() - 2), -1, given.shape[-1])


def _empty_result(made: Any, rows: Tensor, count: int) -> Tensor:
    if not isinstance(made, Tensor) or made.shape[:-1] != (*rows.shape[:-2], count):
        raise ApplyFailed(
            f"a module that split_matmul runs in parts returned "
            f"{getattr(made, 'shape', type(made).__name__)} for {count} rows, so its rows are not "
            "independent. Remove it from the plan."
        )
    return made.new_empty(rows.shape[-2], made.shape[-1])
