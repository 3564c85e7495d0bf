"""Activation modules that write their result over their input, and back again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchtrim.errors import ApplyFailed
from torchtrim.techniques.handles import Handle, Handles
from torchtrim.techniques.places import module_at
from torchtrim.techniques.swap import Swapped

_SETTABLE = ("ReLU", "LeakyReLU")
_CLAMPS = ("ReLU6", "Hardtanh")


def overwrite_places(roots: Mapping[str, nn.Module], where: Sequence[str]) -> Handle:
    """Let the named modules overwrite their inputs. Raises `ApplyFailed`, the model as it was."""
    overwriting = Handles()
    try:
        for place in where:
            overwriting.add(_overwriting(_activation(roots, place)))
    except BaseException:
        overwriting.revert()
        raise
    return overwriting


class Overwriting:
    """One module that overwrites its input."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._before = module, module.inplace
        module.inplace = True  # type: ignore[assignment]

    def revert(self) -> None:
        """Make the module what it was."""
        self._module.inplace = self._before


def _overwriting(module: nn.Module) -> Handle:
    if type(module).__name__ in _SETTABLE:
        return Overwriting(module)
    return Swapped(module, lambda forward: _clamping(module, forward))


def _clamping(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A clamp's forward that overwrites its input, and keeps no copy of it."""

    def run(input: torch.Tensor) -> Any:
        if torch.is_grad_enabled() and input.requires_grad:
            return _Clamp.apply(input, module.min_val, module.max_val)  # type: ignore[no-untyped-call]
        return forward(input)

    return run


class _Clamp(torch.autograd.Function):
    """A result is strictly within its bounds where its input is, so backward can do with the result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, low: float, high: float) -> torch.Tensor:
        ctx.bounds = low, high
        ctx.mark_dirty(x)
        with (
            torch._C._AutoDispatchBelowAutograd(),
            torch.enable_grad(),
        ):  # as any operator of forward
            torch.ops.aten.hardtanh_(x, low, high)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (result,) = ctx.saved_tensors
        return torch.ops.aten.hardtanh_backward(grads[0], result, *ctx.bounds), None, None


def _activation(roots: Mapping[str, nn.Module], where: str) -> nn.Module:
    module = module_at(roots, where)
    can = sorted((*_SETTABLE, *_CLAMPS))
    if type(module).__name__ not in can or not hasattr(module, "inplace"):
        raise ApplyFailed(
            f"`{where}` is a {type(module).__name__}, which cannot overwrite its input; "
            f"{', '.join(can)} can. Plan again for this model."
        )
    return module
