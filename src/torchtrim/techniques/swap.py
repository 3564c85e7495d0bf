"""Gives one module instance another forward, and takes it back."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchtrim.errors import ApplyFailed

Forward = Callable[..., Any]


class Swapped:
    """A module whose forward is another's. `revert` makes it what it was.

    The instance becomes one of a subclass of its own class, so parameters, buffers, hooks, names and
    `state_dict` stay. A copy or a pickle of it is of the original class: it is not planned.
    """

    def __init__(self, module: nn.Module, wrap: Callable[[Forward], Forward]) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            raise ApplyFailed(
                f"{type(module).__name__} is compiled by TorchScript, so its forward cannot be "
                "replaced. Plan the module that it was made from."
            )
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise ApplyFailed(
                f"{type(module).__name__} was compiled by its own `compile()`, which would trace the "
                "recomputation too. Plan first and compile afterwards, or plan a module around it."
            )
        self._module = module
        self._class = type(module)
        self._own = module.__dict__.get("forward")
        if self._own is not None:
            module.__dict__["forward"] = functools.wraps(self._own)(wrap(self._own))
        else:
            module.__class__ = _subclass(self._class, wrap)

    def revert(self) -> None:
        """Make the module what it was."""
        if self._own is not None:
            self._module.__dict__["forward"] = self._own
        else:
            self._module.__class__ = self._class


def _subclass(original: type[nn.Module], wrap: Callable[[Forward], Forward]) -> type[nn.Module]:
    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return wrap(functools.partial(original.forward, self))(*args, **kwargs)

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        reduced = original.__reduce_ex__(self, protocol)
        if isinstance(reduced, str):
            return reduced
        return copyreg._reconstructor, (original, object, None), *reduced[2:]  # type: ignore[attr-defined]

    namespace = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": reduce_ex,
        "forward": forward,
    }
    return type(original.__name__, (original,), namespace)
