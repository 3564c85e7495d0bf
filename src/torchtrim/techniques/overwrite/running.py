"""Activation modules that write their result over their input, revertibly."""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchtrim.capture.code.side_effects import SideEffects, changed
from torchtrim.errors import ApplyFailed
from torchtrim.executor.notices import say_once
from torchtrim.executor.places import module_at
from torchtrim.executor.registry import Handle, Handles
from torchtrim.executor.swap import Swapped

_SETTABLE = ("ReLU", "LeakyReLU")
_CLAMPS = ("ReLU6", "Hardtanh")


def overwrite_places(roots: Mapping[str, nn.Module], where: Sequence[str]) -> Handle:
    """Let the named modules overwrite their inputs. On `ApplyFailed` the model is unchanged."""
    handles = Handles()
    try:
        for place in where:
            module = _activation(roots, place)
            wrap = functools.partial(_writing, place, module, Holders(module))
            handles.add(Swapped(module, wrap))
    except BaseException:
        handles.revert()
        raise
    return handles


Count = tuple[int, ...]


class Holders:
    """Detects inputs with more references than in the first calls from the same line of the program.

    Counts references to the tensor in Python, to the tensor in C++, and of tensors to its storage, and
    compares them with the lowest counts seen at that line, which may hold its argument itself. A hook, a list
    or a view that also holds the tensor would see it overwritten.
    """

    def __init__(self, module: nn.Module) -> None:
        self._code = SideEffects([module]).references
        self._fewest: dict[tuple[types.CodeType, int, int], Count] = {}
        self._complete: set[int] = set()

    def is_replaced(self) -> bool:
        """Return True if the program has replaced the module's forward with its own function."""
        return changed(self._code)

    def are_more(self, tensor: torch.Tensor, count: int) -> bool:
        """Return True if the tensor has more references than expected. `count` is the caller's count."""
        *_, ours = place = _calling_line(sys._getframe(2))
        storage = tensor.untyped_storage()._cdata
        used: int = tensor._use_count()  # type: ignore[attr-defined]
        now = count, used, torch._C._storage_Use_Count(storage)
        if (fewest := self._fewest.get(place)) is not None:
            self._complete.add(ours)
        elif ours in self._complete:
            return True
        else:
            fewest = now
        self._fewest[place] = tuple(map(min, fewest, now))
        return any(map(operator.gt, now, fewest))


def _calling_line(frame: types.FrameType) -> tuple[types.CodeType, int, int]:
    """Return the calling instruction of the program, and the number of our frames in between."""
    ours = 0
    while frame.f_back is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in ("torch", "torchtrim"):
            break
        ours += package == "torchtrim"
        frame = frame.f_back
    return frame.f_code, frame.f_lasti, ours


def _writing(
    where: str, module: nn.Module, holders: Holders, forward: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a forward that overwrites its input, keeps no copy of it, and accepts views.

    An input with further references is left alone.
    """
    settable = type(module).__name__ in _SETTABLE

    def run(input: torch.Tensor) -> Any:
        if not isinstance(input, torch.Tensor) or holders.is_replaced():
            return forward(input)
        if holders.are_more(input, sys.getrefcount(input)):
            held = "its input is also referenced by a hook or a variable, so it is not overwritten."
            say_once(where, held)
            return forward(input)
        graded = torch.is_grad_enabled() and input.requires_grad
        if graded and not (settable and not input._is_view()):
            return _Over.apply(input, *_operators(module))  # type: ignore[no-untyped-call]
        return _in_place(module, forward, input) if settable else forward(input)

    return run


def _in_place(module: Any, forward: Callable[..., Any], input: torch.Tensor) -> Any:
    """Run the forward in place. Copies and files of the module keep the program's own setting."""
    before, module.inplace = module.inplace, True
    try:
        return forward(input)
    finally:
        module.inplace = before


def _operators(module: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the operator that overwrites a tensor, and the one that computes the input's gradient."""
    aten = torch.ops.aten
    if type(module).__name__ == "ReLU":
        return aten.relu_, lambda comes, made: aten.threshold_backward(comes, made, 0)
    if type(module).__name__ == "LeakyReLU":
        slope = module.negative_slope
        return (
            lambda x: aten.leaky_relu_(x, slope),
            lambda comes, made: aten.leaky_relu_backward(comes, made, slope, True),
        )
    bounds = module.min_val, module.max_val
    return (
        lambda x: aten.hardtanh_(x, *bounds),
        lambda comes, made: aten.hardtanh_backward(comes, made, *bounds),
    )


class _Over(torch.autograd.Function):
    """An overwrite whose backward uses the result, which is inside the bounds exactly where the input is.

    If a view is written to, autograd rebuilds the history of its base, and its backward copies the gradient
    twice. An alias shares the view's memory and version, but has no history.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        write: Callable[[torch.Tensor], Any],
        gradient: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        ctx.gradient = gradient
        result = x.detach() if x._is_view() else x
        if result is x:
            ctx.mark_dirty(x)
        with (
            torch._C._AutoDispatchBelowAutograd(),
            torch.enable_grad(),
        ):  # Like operators of forward.
            write(result)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (result,) = ctx.saved_tensors
        return ctx.gradient(grads[0], result), None, None


def _activation(roots: Mapping[str, nn.Module], where: str) -> nn.Module:
    module, can = module_at(roots, where), sorted((*_SETTABLE, *_CLAMPS))
    if type(module).__name__ not in can or not hasattr(module, "inplace"):
        raise ApplyFailed(
            f"`{where}` is a {type(module).__name__}, which cannot overwrite its input; "
            f"{', '.join(can)} can. Plan again for this model."
        )
    return module
