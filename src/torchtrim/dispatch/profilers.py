"""Checks if the script or torchtrim uses the process's only profiler."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._C._autograd import _profiler_enabled
from torch.autograd import profiler as autograd_profiler
from torch.autograd.profiler import record_function

from torchtrim.dispatch.frames import passed_through
from torchtrim.dispatch.patches import Patches

_KINDS: tuple[Any, ...] = (torch.profiler.profile, autograd_profiler.profile, record_function)


class Made:
    """The profilers and ranges of this process: noted as they are made, and those before searched for once.

    The search takes 50 ms or more, since it looks at all objects.
    """

    def __init__(self) -> None:
        self._patches = Patches()
        self._known: WeakValueDictionary[int, Any] | None = None
        self._is_complete = False

    def follow(self) -> Callable[[], None]:
        """Note them from now on. Return the function that ends this, if no other has begun it."""
        if self._known is not None:
            return lambda: None
        self._known, self._is_complete = WeakValueDictionary(), False
        for kind in _KINDS:
            self._patches.replace(kind, "__init__", self._noting(kind.__init__))
        return self._end

    def _end(self) -> None:
        self._patches.undo()
        self._known = None

    def _noting(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        @passed_through
        def init(one: Any, *args: Any, **kwargs: Any) -> None:
            original(one, *args, **kwargs)
            if self._known is not None:
                self._known[id(one)] = one

        return init

    def __iter__(self) -> Iterator[Any]:
        """Yield all that are alive, older ones first."""
        known: WeakValueDictionary[int, Any] = WeakValueDictionary()
        if self._known is not None:
            known = self._known
        if self._known is None or not self._is_complete:
            self._is_complete = True
            for one in filter(lambda thing: isinstance(thing, _KINDS), gc.get_referrers(*_KINDS)):
                known.pop(id(one), None)  # in the order of the search, which has all
                known[id(one)] = one
        for reference in known.valuerefs():  # a copy: other threads may make more
            if (one := reference()) is not None:
                yield one


made = Made()


def is_taken() -> bool:
    """Return True if a profiler is running or prepared: starting another would crash it."""
    return runs() or waits_to_start()


def runs() -> bool:
    """Return True if a profiler is running."""
    return bool(_profiler_enabled())


def waits_to_start() -> bool:
    """Return True if a profiler is prepared but not running."""
    return any(map(_waits, made))


def _waits(thing: Any) -> bool:
    if isinstance(thing, record_function):
        return False
    # A disabled or half-constructed profiler lacks most attributes.
    if isinstance(thing, torch.profiler.profile):
        action = getattr(thing, "current_action", None)
        return action is torch.profiler.ProfilerAction.WARMUP
    return bool(getattr(thing, "entered", False)) and thing.kineto_results is None


def open_ranges() -> list[record_function]:
    """Return the open `record_function` ranges, outer ones first."""
    ranges = (one for one in made if isinstance(one, record_function))
    return [one for one in ranges if getattr(one, "record", None) is not None]


def end_open_ranges() -> None:
    """End all open ranges before the profiler stops.

    A range that ended later would write its time into freed memory of the profiler.
    """
    for one in open_ranges():
        torch.ops.profiler._record_function_exit._RecordFunction(one.record)
