"""Maps each operator to the call of a function of the user's source that ran it.

Frames are told apart by a mark in `f_trace`, which Python reads only under `sys.settrace`: it ends with its
frame, without keeping the frame's variables alive. Under a debugger no functions are found.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchtrim.capture.code.side_effects import SideEffects
from torchtrim.dispatch.places import Places
from torchtrim.records.profile import Function, FunctionCall

_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class _Mark(NamedTuple):
    """A running call: its own number and its callers' in one recording, its `owner`."""

    owner: object
    numbers: tuple[int, ...]

    def __call__(self, *_: Any) -> None:
        """Python requires that `f_trace` can be called."""


class _RawCall:
    def __init__(self, module: str, code: types.CodeType, first: int) -> None:
        self.module, self.code = module, code
        self.first = self.last = first
        self.graded = torch.is_grad_enabled()


class FunctionCalls:
    """The calls of the user's functions during a recording."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._owner = object()
        self._calls: list[_RawCall] = []

    def ran(self, frame: types.FrameType | None, operator: int) -> None:
        """Note an operator, called by this frame."""
        if sys.gettrace() is None:
            for number in self._numbers(frame, operator):
                self._calls[number].last = operator + 1

    def _numbers(self, frame: types.FrameType | None, operator: int) -> tuple[int, ...]:
        new: list[types.FrameType] = []
        numbers: tuple[int, ...] = ()
        while frame is not None:
            if isinstance(mark := frame.f_trace, _Mark) and mark.owner is self._owner:
                numbers = mark.numbers
                break
            if self._places.is_users((frame.f_code, 0)):
                new.append(frame)
            frame = frame.f_back
        for one in reversed(new):
            if not one.f_code.co_flags & _SUSPENDED:
                numbers = (*numbers, len(self._calls))
                module = one.f_globals.get("__name__", "")
                self._calls.append(_RawCall(module, one.f_code, operator))
            setattr(one, "f_trace", _Mark(self._owner, numbers))  # noqa: B010  (mypy: no trace function)
        return numbers

    def records(self) -> list[Function]:
        """Return the functions that can be found by their names again, with their calls."""
        calls: defaultdict[tuple[str, types.CodeType], list[FunctionCall]] = defaultdict(list)
        for call in self._calls:
            found = FunctionCall(call.first, call.last, call.graded)
            calls[call.module, call.code].append(found)
        return list(_records(calls))


def _records(
    calls: dict[tuple[str, types.CodeType], list[FunctionCall]],
) -> Iterator[Function]:
    for (module, code), several in calls.items():
        name = f"{module}.{code.co_qualname}"
        function = function_at(name)
        if function is not None and function.__code__ is code:
            where = name, code.co_filename, code.co_firstlineno
            yield Function(*where, tuple(several), *SideEffects((), [function]).recorded)


def function_at(name: str) -> types.FunctionType | None:
    """Return the function of a loaded module, such as `render.composite`, or None if there is none.

    A decorated function is the one under its decorators, if they keep a reference to it.
    """
    module, _, attribute = name.rpartition(".")
    found = inspect.unwrap(vars(sys.modules.get(module, sys)).get(attribute))  # type: ignore[arg-type]
    plain = isinstance(found, types.FunctionType) and not found.__code__.co_freevars
    return found if plain else None
