"""Arguments of a call that runs more than once: a copy for each run, and what it wrote to them.

A run writes to the copies of lists, dicts, sets, arrays, and of objects with attributes or slots, such as a
key-value cache that each block extends, so another run finds them as they were. Tensors are shared, and so
are random generators, whose state is put back. A call may run only once if it is given what has no copies:
an iterator, a file, a module outside of the block, or a function with side effects.
"""

from __future__ import annotations

import collections
import copy
import enum
import functools
import io
import types
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from torchtrim.capture.code.live import content, is_generator, is_trusted
from torchtrim.capture.code.side_effects import SideEffects
from torchtrim.capture.recording import COPIED_DEPTH, SHARED
from torchtrim.core.tuples import with_items

_PLAIN = (torch.Tensor, str, bytes, int, float, complex, type(None))
_BUILT_IN = (
    types.BuiltinFunctionType,
    types.ModuleType,
    torch.dtype,
    torch.device,
    enum.Enum,
    io.IOBase,
)
_AS_IS = (torch.Tensor, *SHARED, *_BUILT_IN, range, slice)
_FILLED = (set, collections.deque)
_ROWS = (tuple, list, collections.deque)
_KNOWN: dict[tuple[Any, ...], FunctionEffects] = {}


class FunctionEffects(NamedTuple):
    """The random generators of a function among the arguments, and its first side effect, in words."""

    generators: tuple[Any, ...]
    write: str


class GivenArguments:
    """A call's arguments as they are now.

    `owned`: ids of the modules whose state is kept for another run. `why_once`: why the call may run only
    once, or empty. `generators`: random generators among the arguments.
    """

    def __init__(self, call: Any, owned: Collection[int] = ()) -> None:
        self.why_once = ""
        self.generators: list[Any] = []
        self._owned = owned
        self._then = _fresh(call, {}, COPIED_DEPTH, self._note)

    def again(self) -> Any:
        """Return the arguments for one more run."""
        return as_they_are(self._then)

    def _note(self, value: Any, copied: Any) -> None:
        owner = value.__self__ if isinstance(value, types.BuiltinFunctionType) else value
        if is_generator(owner):
            self.generators += [owner] if owner is not torch.default_generator else []
        elif isinstance(value, nn.Module):
            if id(value) not in self._owned:
                self._refuse("it is given a module, whose state another run would change")
        elif copied is value and (isinstance(value, Iterator) or _is_mutable(value)):
            self._refuse(
                f"it is given a {type(value).__name__}, which cannot be copied for another run"
            )
        elif isinstance(value, types.FunctionType) and not is_trusted(value):
            effects = _effects_of(value)
            self.generators += effects.generators
            if effects.write:
                self._refuse(f"it is given a function with side effects: {effects.write}")

    def _refuse(self, why: str) -> None:
        self.why_once = self.why_once or why


def _effects_of(function: types.FunctionType) -> FunctionEffects:
    """Return the effects of a function, known again for a closure over other tensors and numbers."""
    key = function.__code__, *map(_kind, map(content, function.__closure__ or ()))
    if (known := _KNOWN.get(key)) is not None:
        return known
    found = SideEffects((), [function])
    effects = FunctionEffects(tuple(found.generators), "".join(map(str, found.writes[:1])))
    if None not in key:
        _KNOWN[key] = effects
    return effects


def _kind(value: Any) -> Any:
    """Return what the effects of a closure depend on of a value, or None if that may be anything.

    It holds no value, or the tensors of each call would stay.
    """
    if isinstance(value, nn.Module):
        return weakref.ref(value)
    return type(value) if isinstance(value, _PLAIN) else None


def as_they_are(value: Any) -> Any:
    """Copy the containers and objects of a value; tensors, modules and what cannot be copied are shared.

    So is what is nested deeper than eight levels.
    """
    return _fresh(value, {}, COPIED_DEPTH, lambda *_: None)


_Note = Callable[[Any, Any], None]


def _fresh(value: Any, known: dict[int, Any], depth: int, note: _Note) -> Any:
    if isinstance(value, _PLAIN) or not depth:
        return value
    if id(value) not in known:
        known[id(value)] = value
        if not isinstance(value, _AS_IS):
            known[id(value)] = _copied(value, lambda one: _fresh(one, known, depth - 1, note))
        note(value, known[id(value)])
    return known[id(value)]


def _copied(value: Any, fresh: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple):
        items = [fresh(item) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return with_items(value, items)
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, fresh(value.__self__))
    if isinstance(value, functools.partial):
        named = {name: fresh(one) for name, one in value.keywords.items()}
        return functools.partial(fresh(value.func), *map(fresh, value.args), **named)
    if not _is_mutable(value):
        return value
    try:
        return _twin(value, fresh)
    except Exception:
        return value


def _is_mutable(value: Any) -> bool:
    """Return True for containers, buffers, and objects with attributes; not for callables of libraries."""
    if hasattr(type(value), "__setitem__") or isinstance(value, _FILLED):
        return True
    if callable(value) and (isinstance(value, types.FunctionType) or is_trusted(type(value))):
        return False
    own = getattr(value, "__dict__", None)
    if isinstance(value, tuple):  # a subclass of a named tuple has attributes, mostly none
        return bool(own)
    return isinstance(own, dict) or bool(_slots(value))


def _twin(value: Any, fresh: Callable[[Any], Any]) -> Any:
    twin = copy.copy(value)
    if twin is value:
        return value
    if isinstance(value, list):
        twin[:] = [fresh(item) for item in value]
    elif isinstance(value, collections.deque):
        twin.clear()
        twin.extend([fresh(item) for item in value])
    elif isinstance(value, dict):
        for key, item in value.items():
            twin[key] = fresh(item)
    else:
        for name, item in getattr(value, "__dict__", {}).items():
            vars(twin)[name] = fresh(item)
        for name, item in _slots(value).items():
            object.__setattr__(twin, name, fresh(item))
    return twin


def _slots(value: Any) -> dict[str, Any]:
    """Return the slots of an object that have values."""
    members = {
        name: one
        for kind in type(value).__mro__
        for name, one in vars(kind).items()
        if "__slots__" in vars(kind) and isinstance(one, types.MemberDescriptorType)
    }
    return {name: getattr(value, name) for name in members if hasattr(value, name)}


def held(value: Any) -> list[Any]:
    """Return what containers and objects hold, to compare with `is_same` before and after a call."""
    found: list[Any] = []
    _hold(value, found, set(), COPIED_DEPTH)
    return found


def is_same(before: list[Any], after: list[Any]) -> bool:
    """Return True if nothing was written between two calls of `held`."""
    return len(before) == len(after) and all(
        a is b or (type(a) is type(b) is bytes and a == b)
        for a, b in zip(before, after, strict=True)
    )


def _hold(value: Any, found: list[Any], seen: set[int], depth: int) -> None:
    found.append(value)
    if isinstance(value, _AS_IS) or id(value) in seen or not depth:
        return
    seen.add(id(value))
    if isinstance(value, (*_ROWS, dict, set, frozenset)):
        inner = [*value, *value.values()] if isinstance(value, dict) else [*value]
    elif isinstance(value, types.MethodType):
        inner = [value.__self__]
    elif isinstance(value, functools.partial):
        inner = [value.func, value.args, value.keywords]
    elif not _is_mutable(value):
        return
    else:
        inner = [bytes(value)] if isinstance(value, bytearray) else []
        inner += [bytes(value.tobytes())] if hasattr(type(value), "tobytes") else []
    own = getattr(value, "__dict__", None)
    for one in (*inner, *(own if isinstance(own, dict) else {}).values(), *_slots(value).values()):
        _hold(one, found, seen, depth - 1)
