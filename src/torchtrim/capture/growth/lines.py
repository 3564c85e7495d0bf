"""Weighs containers, and finds the lines that fill them by checking after each executed line."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import types
from collections import deque
from collections.abc import Collection, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from torchtrim.dispatch.places import Places, line_of, variables_of
from torchtrim.dispatch.storages import storages_in
from torchtrim.records.profile import Place

_LRU = functools._lru_cache_wrapper
CONTAINERS = (dict, list, set, deque, _LRU)
_NOT_ENTERED = (
    *(type, nn.Module, torch.dtype, torch.device),
    *(types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(types.CodeType, types.FrameType, types.GeneratorType, types.TracebackType),
)
_LIMITS = ("maxlen", "maxsize")
_MOST_ENTERED = 300_000
"""Objects. Arbitrary: about a tenth of a second for one container."""


class Weight(NamedTuple):
    """Memory a container keeps alive: bytes of Python objects, and storages with their bytes."""

    python: int
    storages: dict[int, int]

    @property
    def bytes(self) -> int:
        """Total bytes."""
        return self.python + sum(self.storages.values())


def containers() -> list[Any]:
    """Return all containers known to the garbage collector, without the dicts inside `lru_cache`s."""
    everything = gc.get_objects()
    fits = {kind: issubclass(kind, CONTAINERS) for kind in set(map(type, everything))}
    things = [thing for thing in everything if fits[type(thing)]]
    inner = {id(one) for cache in things if type(cache) is _LRU for one in gc.get_referents(cache)}
    return [thing for thing in things if id(thing) not in inner]


def of_coverage() -> set[int]:
    """Return the ids of coverage.py's containers, which grow with executed lines, not with the stream."""
    if "coverage" not in sys.modules:
        return set()
    waiting = [one for one in gc.get_objects() if str(type(one).__module__).startswith("coverage.")]
    ids: set[int] = set()
    while waiting:
        for part in gc.get_referents(waiting.pop()):
            if type(part) in (dict, list, set) and id(part) not in ids:
                ids.add(id(part))
                waiting.append(part)
    return ids


def length(container: Any) -> int:
    """Return the number of entries, bypassing a subclass's `__len__`."""
    for kind in (dict, list, set, deque):
        if issubclass(type(container), kind):
            return int(kind.__len__(container))
    return int(container.cache_info().currsize)


def is_bounded(container: Any) -> bool:
    """Return True if a container has a limit: `maxlen`, `maxsize`, or the size of a function's cache."""
    if issubclass(type(container), _LRU):
        return container.cache_info().maxsize is not None
    if type(container) is deque:
        return container.maxlen is not None
    if type(container) in (dict, list, set):
        return False
    named = (inspect.getattr_static(container, name, None) for name in _LIMITS)
    return any(isinstance(limit, int) for limit in named) or (
        issubclass(type(container), deque) and deque.maxlen.__get__(container) is not None
    )


def kind_of(container: Any) -> str:
    """Return its class name, or the kind of a function's cache."""
    return "lru_cache" if issubclass(type(container), _LRU) else type(container).__name__


def weigh(container: Any, leave_out: Collection[int]) -> Weight:
    """Return the weight of a container and its entries at any depth, without modules, functions and the
    containers whose ids are in `leave_out`."""
    python = 0
    storages: dict[int, int] = {}
    seen = {id(container)}
    waiting = [container]
    while waiting and len(seen) < _MOST_ENTERED:
        thing = waiting.pop()
        python += _size(thing)
        if issubclass(type(thing), torch.Tensor):
            storages |= {key: one.nbytes() for key, one in storages_in([thing]).items()}
            continue
        for part in gc.get_referents(thing):
            if id(part) in seen or issubclass(type(part), _NOT_ENTERED) or id(part) in leave_out:
                continue
            seen.add(id(part))
            waiting.append(part)
    return Weight(python, storages)


def _size(thing: Any) -> int:
    try:
        return sys.getsizeof(thing)
    except Exception:  # from a class's own `__sizeof__`
        return 0


_OWN = str(Path(__file__).parents[2])


class Line(NamedTuple):
    """A source line."""

    path: str
    line: int
    function: str


class Filler(NamedTuple):
    """The line that fills a container, and the user's line that led there, or None if it is the same."""

    place: Line
    caller: Line | None


class Fillers:
    """A tracer of this thread's lines between `start` and `stop`. `found` is keyed by container id.

    `traced` are the frames with a trace function of ours, and the functions it replaced.
    """

    def __init__(self, places: Places) -> None:
        self.found: dict[int, Filler] = {}
        self._places = places
        self._watched: dict[int, Any] = {}
        self._lengths: dict[int, int] = {}
        self._before: tuple[FrameType, int] | None = None
        self._outer: Any = None
        self.traced: list[tuple[FrameType, Any]] = []

    def start(self, containers: Mapping[int, Any]) -> None:
        """Watch these containers until all were filled or `stop` is called."""
        self._watched = dict(containers)
        self._lengths = {number: length(one) for number, one in containers.items()}
        self._outer = sys.gettrace()
        self._before = _line_below(sys._getframe(1))
        frame = self._before[0] if self._before is not None else None
        while frame is not None:
            if not _is_own(frame.f_code):
                self.traced.append((frame, frame.f_trace))
                frame.f_trace = self._line
            frame = frame.f_back
        sys.settrace(self._called)

    def stop(self) -> None:
        """Check a last time and stop tracing."""
        if self._watched:
            self._look()
        if sys.gettrace() in (self._called, None):
            sys.settrace(self._outer)
        for frame, trace in self.traced:
            frame.f_trace = trace
            variables_of(frame)
        self.traced.clear()
        self._watched.clear()
        self._before = None

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        return None if _is_own(frame.f_code) else self._line(frame, event, argument)

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not self._watched:
            return None
        self._look()
        self._before = _line_below(frame.f_back if event == "return" else frame)
        return self._line

    def _look(self) -> None:
        for number, container in list(self._watched.items()):
            now = length(container)
            if now > self._lengths[number] and self._before is not None:
                self.found[number] = self._filler(*self._before)
                del self._watched[number]
            else:
                self._lengths[number] = now

    def _filler(self, frame: FrameType, line: int) -> Filler:
        here = Line(frame.f_code.co_filename, line, frame.f_code.co_qualname)
        if self._places.is_users((frame.f_code, frame.f_lasti)):
            return Filler(here, None)
        library, user = self._places.find(frame.f_back)
        caller = user or library
        is_users = caller is not None and self._places.is_users(caller)
        return Filler(here, line_at(caller) if caller is not None and is_users else None)


def _line_below(frame: FrameType | None) -> tuple[FrameType, int] | None:
    """Return the innermost frame outside torchtrim, and its line."""
    while frame is not None and _is_own(frame.f_code):
        frame = frame.f_back
    return None if frame is None else (frame, frame.f_lineno)


def line_at(spot: tuple[CodeType, int]) -> Line:
    """Return the source line of an instruction."""
    return Line(spot[0].co_filename, line_of(spot), spot[0].co_qualname)


def number_of(places: list[Place], line: Line | None) -> int:
    """Return a line's number in the table, adding it; -1 without a line."""
    if line is None:
        return -1
    place = Place(*line)
    if place not in places:
        places.append(place)
    return places.index(place)


def _is_own(code: CodeType) -> bool:
    return code.co_filename.startswith(_OWN)
