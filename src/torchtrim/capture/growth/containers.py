"""Containers that Python can reach, how long they are, and what they alone keep alive."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import types
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from torchtrim.dispatch.storages import parts_of

_LRU = functools._lru_cache_wrapper
CONTAINERS = (dict, list, set, deque, _LRU)
_NOT_ENTERED = (
    *(type, nn.Module, torch.dtype, torch.device),
    *(types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(types.CodeType, types.FrameType, types.GeneratorType, types.TracebackType),
)
_LIMITS = ("maxlen", "maxsize")
_MOST_ENTERED = 300_000


class Weight(NamedTuple):
    """What a container keeps alive: bytes of Python's objects, and storages with their bytes."""

    python: int
    storages: dict[int, int]

    @property
    def bytes(self) -> int:
        """All of them."""
        return self.python + sum(self.storages.values())


def containers() -> list[Any]:
    """Every container that the garbage collector knows, without the dicts inside functions' caches."""
    everything = gc.get_objects()
    known: dict[type, bool] = {}
    found: list[Any] = []
    inner: set[int] = set()
    for thing in everything:
        kind = type(thing)
        fits = known.get(kind)
        if fits is None:
            fits = known[kind] = issubclass(kind, CONTAINERS)
        if fits:
            found.append(thing)
            if kind is _LRU:
                inner.update(map(id, gc.get_referents(thing)))
    return [thing for thing in found if id(thing) not in inner]


def of_coverage() -> set[int]:
    """The ids of the containers in which coverage.py keeps the lines that ran: they grow, and not for the
    stream's sake."""
    if "coverage" not in sys.modules:
        return set()
    everything = gc.get_objects()
    waiting = [thing for thing in everything if str(type(thing).__module__).startswith("coverage.")]
    found: set[int] = set()
    while waiting:
        for part in gc.get_referents(waiting.pop()):
            if type(part) in (dict, list, set) and id(part) not in found:
                found.add(id(part))
                waiting.append(part)
    return found


def length(container: Any) -> int:
    """How many entries it has, whatever a subclass says."""
    for kind in (dict, list, set, deque):
        if issubclass(type(container), kind):
            return int(kind.__len__(container))
    return int(container.cache_info().currsize)


def is_bounded(container: Any) -> bool:
    """Whether it says how many entries it may hold: a deque or another by `maxlen` or `maxsize`, the cache
    of a function."""
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
    """What it is called: its class, or what a cached function is cached by."""
    return "lru_cache" if issubclass(type(container), _LRU) else type(container).__name__


def weigh(container: Any, leave_out: Collection[int]) -> Weight:
    """What a container and its entries hold, at any depth; modules, functions and `leave_out`, ids of other
    containers, are not entered."""
    python = 0
    storages: dict[int, int] = {}
    seen = {id(container)}
    waiting = [container]
    while waiting and len(seen) < _MOST_ENTERED:
        thing = waiting.pop()
        python += _size(thing)
        if issubclass(type(thing), torch.Tensor):
            storages.update(_storages(thing))
            continue
        for part in gc.get_referents(thing):
            if id(part) in seen or issubclass(type(part), _NOT_ENTERED) or id(part) in leave_out:
                continue
            seen.add(id(part))
            waiting.append(part)
    return Weight(python, storages)


def _storages(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    for part in parts_of(tensor):
        try:
            storage = part.untyped_storage()
        except (NotImplementedError, RuntimeError):
            continue
        yield storage._cdata, storage.nbytes()


def _size(thing: Any) -> int:
    try:
        return sys.getsizeof(thing)
    except Exception:
        return 0
