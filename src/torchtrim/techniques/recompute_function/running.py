"""Makes functions rerun in backward: every name that refers to one then refers to the planned one."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.fx import _symbolic_trace
from torch.utils._pytree import tree_leaves

from torchtrim.capture.functions import function_at
from torchtrim.errors import ApplyFailed
from torchtrim.executor.registry import Handle, all_or_none
from torchtrim.techniques.recompute.rerun import Rerun, Telling, run_again


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


def _trampoline(*args: Any, _torchtrim_run: Any, **kwargs: Any) -> Any:
    return _torchtrim_run(*args, **kwargs)


class PlannedFunction:
    """Replaces the code of a function until `revert`; the function stays the same object."""

    def __init__(self, function: FunctionType, where: str, telling: Telling) -> None:
        if function.__code__ is _trampoline.__code__:
            raise ApplyFailed(f"`{where}` is planned already. Name it once in the plan.")
        self._function = function
        self._code, self._keywords = function.__code__, function.__kwdefaults__
        self._own = FunctionType(
            self._code, function.__globals__, function.__name__, function.__defaults__
        )
        self._own.__kwdefaults__ = self._keywords
        self._own.__module__ = function.__module__
        self._where, self._telling = where, telling
        self._blocks: dict[tuple[int, ...], Rerun] = {}
        self._block(())
        self._signature = vars(function).get("__signature__")
        vars(function).setdefault("__signature__", inspect.signature(function))
        function.__kwdefaults__ = {"_torchtrim_run": self._run}
        function.__code__ = _trampoline.__code__

    def revert(self) -> None:
        """Restore the function."""
        self._function.__code__ = self._code
        self._function.__kwdefaults__ = self._keywords
        if self._signature is None:
            vars(self._function).pop("__signature__", None)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if _is_transformed():
            return self._own(*args, **kwargs)
        modules = [one for one in tree_leaves((args, kwargs)) if isinstance(one, nn.Module)]
        return run_again(self._block(modules), self._own, *args, **kwargs)

    def _block(self, modules: Sequence[nn.Module]) -> Rerun:
        """Return the block of the function and the modules among its arguments."""
        key = tuple(map(id, modules))
        if key not in self._blocks:
            self._blocks[key] = Rerun(self._where, modules, self._telling, [self._own])
        return self._blocks[key]


def _is_transformed() -> bool:
    """Return True under tracing, and under transforms of torch.func, which take no hooks on saved tensors."""
    tracing = torch._C._get_tracing_state() is not None or _symbolic_trace._is_fx_tracing_flag
    return tracing or torch._C._functorch.peek_interpreter_stack() is not None
