"""Frames that Dynamo runs as they are, without the seconds that importing Dynamo takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_Function = TypeVar("_Function", bound=Callable[..., Any])
_ACTIONS = eval_frame._FrameAction


def uncompiled(function: _Function) -> _Function:
    """Have Dynamo run a Python function as it is, and all that it calls."""
    return _skipped(function, _ACTIONS.SKIP)


def passed_through(function: _Function) -> _Function:
    """Have Dynamo run a Python function as it is, but compile what it calls."""
    return _skipped(function, _ACTIONS.DEFAULT)


def _skipped(function: _Function, callees: Any) -> _Function:
    strategy = eval_frame._FrameExecStrategy(_ACTIONS.SKIP, callees)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function
