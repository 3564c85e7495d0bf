"""Makes functions rerun in backward: every name that refers to one then refers to the planned one."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchtrim.capture.code.live import UNKNOWN
from torchtrim.capture.functions import function_at
from torchtrim.errors import ApplyFailed
from torchtrim.executor.notices import say_once
from torchtrim.executor.registry import Handle, all_or_none
from torchtrim.executor.swap import does_not_train
from torchtrim.techniques.recompute.rerun import Rerun, Telling, run_again

_Kind = tuple[tuple[int, ...], tuple[type, ...], tuple[str, ...]]
"""The modules among the arguments of a call, the types of all, and the names of some."""


def rerun_functions(where: Sequence[str], telling: Telling) -> Handle:
    """Make each function rerun in backward. If it raises `ApplyFailed`, all are unchanged."""
    return all_or_none(where, lambda place: _planned(place, telling))


def _planned(where: str, telling: Telling) -> Handle:
    name = where.partition(":")[2]
    function = function_at(name)
    if function is None:
        raise ApplyFailed(
            f"the plan names `{where}`, but no module that the script has loaded has a function {name}. "
            "Plan again for this script."
        )
    return PlannedFunction(function, where, telling)


_PLANNED = "_torchtrim_planned"


def _trampoline(*args: Any, _torchtrim_run: Any, **kwargs: Any) -> Any:
    return _torchtrim_run(*args, **kwargs)


class PlannedFunction:
    """Replaces the code of a function until `revert`; the function stays the same object."""

    def __init__(self, function: FunctionType, where: str, telling: Telling) -> None:
        if hasattr(function, _PLANNED):
            raise ApplyFailed(f"`{where}` is planned already. Name it once in the plan.")
        self._function = function
        self._code, self._keywords = function.__code__, function.__kwdefaults__
        self._own = FunctionType(
            self._code, function.__globals__, function.__name__, function.__defaults__
        )
        self._own.__kwdefaults__ = self._keywords
        self._own.__module__ = function.__module__
        setattr(self._own, _PLANNED, self)
        self._where, self._telling = where, telling
        self._blocks: dict[_Kind, Rerun | None] = {}
        Rerun(where, (), telling, [self._own])  # raises for a function that no call may run twice
        self._added = {"__signature__", "__wrapped__"} - vars(function).keys()
        vars(function).setdefault("__signature__", inspect.signature(function))
        vars(function)["__wrapped__"] = self._own  # its source is the one that TorchScript reads
        self._set(_trampoline.__code__, {"_torchtrim_run": self._run})

    def revert(self) -> None:
        """Restore the function."""
        self._set(self._code, self._keywords)
        for name in self._added:
            vars(self._function).pop(name, None)

    def _set(self, code: CodeType, keywords: dict[str, Any] | None) -> None:
        self._function.__code__, self._function.__kwdefaults__ = code, keywords
        # Dynamo keeps the parameters of each function that it has traced.
        dynamo = sys.modules.get("torch._dynamo.variables.functions")
        getattr(dynamo, "_spec_cache", {}).pop(self._function, None)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if does_not_train():
            return self._own(*args, **kwargs)
        block = self._block(args, kwargs)
        if block is None:
            return self._own(*args, **kwargs)
        return run_again(block, self._own, *args, **kwargs)

    def _block(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rerun | None:
        """Return the block of the function and the modules among its arguments, or None if only calls
        unlike this one may run twice.
        """
        modules = [one for one in tree_leaves((args, kwargs)) if isinstance(one, nn.Module)]
        names = tuple(kwargs)
        key = tuple(map(id, modules)), tuple(map(type, (*args, *kwargs.values()))), names
        if key not in self._blocks:
            known = [_known(one) for one in args]
            named = {name: _known(one) for name, one in kwargs.items()}
            called = functools.partial(self._own, *known, **named)
            try:
                self._blocks[key] = Rerun(self._where, modules, self._telling, [called])
            except ApplyFailed as error:
                if not any(self._blocks.values()):
                    raise
                say_once(self._where, f"{error} It runs once from now on.")
                self._blocks[key] = None
        return self._blocks[key]


def _known(argument: Any) -> Any:
    """Return an argument whose value decides what the function writes to, without keeping a tensor alive."""
    if isinstance(argument, torch.Tensor):
        return _ANY_TENSOR
    return argument if isinstance(argument, _PLAIN) else UNKNOWN


_PLAIN = (nn.Module, bool, int, float, str, type(None))
_ANY_TENSOR = torch.empty(0, device="meta")
