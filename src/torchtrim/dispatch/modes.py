"""Puts a dispatch mode under those that run, so that they and it may end in any order.

A recording begins and ends in the middle of the script's own `with` blocks. A mode on top would be
popped by the end of such a block in place of the script's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._C import _disabled_torch_dispatch_impl
from torch._ops import OpOverload
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

COMPOSITE = "CompositeImplicitAutograd"
CUSTOM = torch._C.DispatchKey.CompositeExplicitAutograd
_TORCHS_OWN = ("aten", "prim", "prims", "_c10d_functional", "c10d")
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_FLAGS = (
    "old_dispatch_mode_flags",
    "old_non_infra_dispatch_mode_flags",
    "old_without_ignore_compile_internals_dispatch_mode_flags",
)


def fake_mode() -> Any:
    """The mode of fake tensors that runs, None for none. DTensor asks one for the shapes of results."""
    return torch._C._get_dispatch_mode(_FAKE)


def is_composite(func: Any) -> bool:
    """Whether an operator is made of others. In inference mode torch shows it to modes as one."""
    if not isinstance(func, OpOverload):
        return False
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name: str = func.name()  # type: ignore[no-untyped-call]
    return has(name, COMPOSITE) and not has(name, "CPU")


def is_custom(func: Any) -> bool:
    """Whether an operator is somebody's own, with one kernel for all devices, made of other operators."""
    if not isinstance(func, OpOverload) or func.namespace in _TORCHS_OWN:
        return False
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name: str = func.name()  # type: ignore[no-untyped-call]
    return has(name, CUSTOM.name) and not has(name, "CPU")


def has_own_dispatch(kind: type) -> bool:
    """Whether a class of tensors has a dispatch of its own."""
    own: Any = kind
    return own.__torch_dispatch__ is not _disabled_torch_dispatch_impl


def run_parts(func: Any, args: Any, kwargs: Any, whole: Callable[..., Any]) -> Any:
    """Run what a composite operator is made of, by C++'s composite and not by a decomposition of Python's.

    Composite operators have kernels of their own for nested tensors: those `whole` runs.
    """
    if any(tensor.is_nested for tensor in tensors_among(args)):
        with torch._C._DisableTorchDispatch():
            return whole(func, args, kwargs)
    return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def tensors_among(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Tensors in nested tuples and lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_among(value)


def enter_below(mode: TorchDispatchMode) -> None:
    """Enter a mode as if it had been entered before all of the script's that run now."""
    above = _popped_until(None)
    mode.__enter__()  # type: ignore[no-untyped-call]
    if above:
        _swap_flags(mode, above[-1])
    _push_back(above)


def leave(mode: TorchDispatchMode) -> None:
    """Exit a mode, wherever in the stack it is. Does nothing if it is not there."""
    if not any(one is mode for one in _get_current_dispatch_mode_stack()):
        return
    above = _popped_until(mode)
    if above:
        _swap_flags(mode, above[-1])
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    _push_back(above)


def _popped_until(mode: TorchDispatchMode | None) -> list[TorchDispatchMode]:
    """Pop the script's modes down to `mode`; the top comes first."""
    popped: list[TorchDispatchMode] = []
    for one in reversed(_get_current_dispatch_mode_stack()):
        if one is mode or one.is_infra_mode():
            break
        popped.append(_pop_mode())
    return popped


def _push_back(popped: list[TorchDispatchMode]) -> None:
    for mode in reversed(popped):
        _push_mode(mode)


def _swap_flags(mode: TorchDispatchMode, above: TorchDispatchMode) -> None:
    """What torch's flags were before a mode was entered is kept in it: exchange that of two."""
    for name in _FLAGS:
        ours, theirs = getattr(mode, name), getattr(above, name)
        if ours and theirs:
            ours[-1], theirs[-1] = theirs[-1], ours[-1]
