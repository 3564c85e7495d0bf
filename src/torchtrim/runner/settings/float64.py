"""Has a program run in float64, and keep to it where it asks for float32 by name."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from torchtrim.records.trial import Request

_OLD_TYPES = (torch, "FloatTensor", "DoubleTensor"), (torch.cuda, "FloatTensor", "DoubleTensor")
_NAMES = {
    f"{module.__name__}.{one}": f"{module.__name__}.{other}" for module, one, other in _OLD_TYPES
}


def widen_old_types() -> None:
    """`torch.FloatTensor(2, 3)`, which no mode sees, makes float64 in this process from now on."""
    for module, narrow, wide in _OLD_TYPES:
        setattr(module, narrow, getattr(module, wide))


def load_as_written() -> None:
    """What is read from a file, or sent by a loader's worker, has the type that it was written in."""
    rebuild = torch._utils._rebuild_tensor

    @functools.wraps(rebuild)
    def as_written(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return rebuild(*args)  # type: ignore[no-untyped-call]

    torch._utils._rebuild_tensor = as_written


def keep_wide_in_backward() -> None:
    """What runs again in backward does so under `Wide`, as at first: torch turns modes off there."""
    run_backward = torch.autograd.graph._engine_run_backward

    @functools.wraps(run_backward)
    def wide(*args: Any, **kwargs: Any) -> Any:
        with Wide():
            return run_backward(*args, **kwargs)

    for owner in (torch.autograd, torch.autograd.graph):
        owner._engine_run_backward = wide  # type: ignore[attr-defined]


def prepare(root: nn.Module, request: Request) -> None:
    """Widen and nudge its parameters, buffers and what it is first called with, as is requested."""
    if request.double:
        root.double()
    if request.nudged:
        with torch.no_grad():
            for tensor in (*root.parameters(), *root.buffers()):
                tensor.copy_(_nudged(tensor))
        _nudge_inputs(root, torch.float64 if request.double else None)


def _nudge_inputs(root: nn.Module, dtype: torch.dtype | None) -> None:
    """Nudge the inputs of the next call, those of float32 in the wider type."""

    def nudge(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _nudged(value.to(dtype) if dtype and value.dtype is torch.float32 else value)
        return value

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        handle.remove()
        return tree_map(nudge, args), tree_map(nudge, kwargs)

    handle = root.register_forward_pre_hook(before, with_kwargs=True)


def _nudged(value: torch.Tensor) -> torch.Tensor:
    """The numbers moved by one rounding each, up or down at random, the same way each time.

    Of a type narrower than float32 they stay, since there one rounding is no small change.
    """
    if value.dtype not in (torch.float32, torch.float64) or value.layout is not torch.strided:
        return value
    own = torch.Generator("cpu").manual_seed(value.numel())
    signs = (
        torch.randint(2, value.shape, generator=own, dtype=torch.int64, device="cpu").to(value) * 2
        - 1
    )
    return value * (1 + torch.finfo(value.dtype).eps * signs)


class Wide(TorchFunctionMode):
    """What is cast to or made in float32 is in float64: `x.float()`, `softmax(x, -1, dtype=torch.float32)`,
    `x.type("torch.FloatTensor")`. So is data that came in float32 and meets float64 where torch wants one
    type, but for what is written to.

    Else the program rounds to float32 itself, and by how much less two runs differ says nothing.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        named = {name: _wide(value) for name, value in (kwargs or {}).items()}
        args = tuple(map(_wide, args))
        try:
            return func(*args, **named)
        except RuntimeError:
            if not _are_mixed((*args, *named.values())) or _writes_narrow(func, args, named):
                raise
        named = {name: _widened(value) for name, value in named.items()}
        return func(*map(_widened, args), **named)


def _are_mixed(values: tuple[Any, ...]) -> bool:
    """Whether there are tensors of float32 and of float64."""
    types = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    return {torch.float32, torch.float64} <= types


def _writes_narrow(func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether a function writes to a tensor of float32: to a copy in float64 it would be lost."""
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return _is_narrow(named.get("out")) or (in_place and _is_narrow(args[0] if args else None))


def _widened(value: Any) -> Any:
    """A tensor of float32 in float64; anything else as it is."""
    return value.double() if _is_narrow(value) else value


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32


def _wide(value: Any) -> Any:
    if isinstance(value, str):
        return _NAMES.get(value, value)
    return torch.float64 if value is torch.float32 else value
