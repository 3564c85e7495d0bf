"""The mutable contents of values: items of containers, and attributes of objects."""

from __future__ import annotations

import array
import collections
import contextvars
import copy
import enum
import functools
import operator
import sys
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from torchtrim.capture.code.live import UNKNOWN, is_trusted
from torchtrim.capture.code.outside import OuterValue, set_attribute, set_item

_MOST_COPIED = 1024  # Items or bytes. Arbitrary: a copy of so many takes some microseconds.
_MOST_LOOKED_AT = 256  # Arbitrary: containers and objects that are looked at in each call.
_NESTED = 4
_HOLDERS = frozenset(("_thread", "argparse", "collections", "types"))
"""Modules of Python whose objects hold what programs put in."""
_OPERATORS = (
    "add", "bool", "contains", "float", "getattr", "getitem", "index", "int", "iter", "len", "mul",
)  # fmt: skip
_CLOSED = (
    bool, int, float, complex, str, bytes, type(None), range, slice, enum.Enum, type, types.ModuleType,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, torch.Tensor, nn.Module,
)  # fmt: skip


def contents(
    roots: Iterable[tuple[str, Any]], names: Collection[str] | None
) -> Iterator[tuple[OuterValue, Any]]:
    """Yield the places in values with their contents: items of containers, and attributes of objects, all or
    the named.

    `roots`: the values, with the names under which they are read.
    """
    pending = [(name, value, _NESTED, True) for name, value in roots]
    seen: set[int] = set()
    while pending and len(seen) < _MOST_LOOKED_AT:
        name, value, depth, is_read = pending.pop()
        of: Any = type(value)
        kind = _kind_of(of)
        if kind is None or not depth or id(value) in seen:
            continue
        seen.add(id(value))
        held = kind(value, names)
        is_read &= kind is not _Object
        now = value
        if held.may_change():
            now = held.read()
            yield OuterValue(id(value), name, held.read, held.write, held.same, is_read), now
        pending += [(name, one, depth - 1, is_read) for one in held.inner(now)]


class _Fixed:
    """A value whose own items stay, such as a tuple."""

    def __init__(self, value: Any, names: Collection[str] | None) -> None:
        self.value, self.names = value, names
        self.kind: Any = type(value)

    def may_change(self) -> bool:
        return False

    def read(self) -> Any:
        """Return a copy of the contents."""
        return self.value

    def write(self, before: Any) -> None:
        """Put a copy back."""
        raise NotImplementedError

    def inner(self, now: Any) -> Iterable[Any]:
        """Return the values in it, or in its copy."""
        return iter(now) if len(now) <= _MOST_COPIED else ()

    def same(self, then: Any, now: Any) -> bool:
        """Compare two copies."""
        return len(then) == len(now) and all(map(operator.is_, then, now))


class _Partial(_Fixed):
    """A function with some of its arguments."""

    def inner(self, now: Any) -> Iterable[Any]:
        return *now.args, *now.keywords.values()


class _List(_Fixed):
    """A list or deque. A subclass may read and write in its own ways, so its base does."""

    def __init__(self, value: Any, names: Collection[str] | None) -> None:
        super().__init__(value, names)
        self.base: Any = next(base for base in _HELD_AS if isinstance(value, base))

    def may_change(self) -> bool:
        return bool(self.base.__len__(self.value) <= _MOST_COPIED)

    def read(self) -> Any:
        return list(self.base.__iter__(self.value))

    def write(self, before: Any) -> None:
        self.base.clear(self.value)
        self.base.extend(self.value, before)

    def inner(self, now: Any) -> Iterable[Any]:
        return iter(now) if now is not self.value else ()


class _Set(_List):
    def write(self, before: Any) -> None:
        self.base.clear(self.value)
        self.base.update(self.value, before)

    def inner(self, now: Any) -> Iterable[Any]:
        return ()


class _Dict(_List):
    def read(self) -> Any:
        return dict.copy(self.value)

    def write(self, before: Any) -> None:
        self.base.clear(self.value)
        for key, one in before.items():
            self.base.__setitem__(self.value, key, one)

    def inner(self, now: Any) -> Iterable[Any]:
        return now.values() if now is not self.value else ()

    def same(self, then: Any, now: Any) -> bool:
        return [*then] == [*now] and super().same(then.values(), now.values())


class _Bytes(_Fixed):
    """A bytearray, or an array of Python."""

    def may_change(self) -> bool:
        return memoryview(self.value).nbytes <= _MOST_COPIED

    def read(self) -> Any:
        return copy.copy(self.value)

    def write(self, before: Any) -> None:
        self.value[:] = before

    def inner(self, now: Any) -> Iterable[Any]:
        return ()

    def same(self, then: Any, now: Any) -> bool:
        return bool(then == now)


class _Array(_Bytes):
    """An array of numpy."""

    def may_change(self) -> bool:
        return bool(self.value.nbytes <= _MOST_COPIED and self.value.flags.writeable)

    def write(self, before: Any) -> None:
        self.value[...] = before

    def same(self, then: Any, now: Any) -> bool:
        return bool(then.tobytes() == now.tobytes())


class _Variable(_Fixed):
    """A context variable."""

    def may_change(self) -> bool:
        return self.value.get(None) is not None

    def read(self) -> Any:
        return self.value.get()

    def write(self, before: Any) -> None:
        self.value.set(before)

    def inner(self, now: Any) -> Iterable[Any]:
        return (now,)

    def same(self, then: Any, now: Any) -> bool:
        return then is now


class _Object(_Fixed):
    """An object: its attributes in `__dict__` and in slots."""

    def may_change(self) -> bool:
        return True

    def read(self) -> Any:
        every = self._table.copy()
        for name, slot in _slots_of(self.kind).items():
            every[name] = _in_slot(slot, self.value)
        if self.names is None or _is_read_out_of_sight(self.kind):
            return every
        return {name: every[name] for name in every if name in self.names}

    def write(self, before: Any) -> None:
        gone = dict.fromkeys(self.read().keys() - before.keys(), UNKNOWN)
        slots = _slots_of(self.kind)
        for name, one in (gone | before).items():
            if name not in slots:
                set_item(self._table, name, one)
            elif one is not _in_slot(slots[name], self.value):
                set_attribute(self.value, name, one)

    def inner(self, now: dict[str, Any]) -> Iterable[Any]:
        return now.values()

    def same(self, then: Any, now: Any) -> bool:
        return then.keys() == now.keys() and all(now[name] is one for name, one in then.items())

    @property
    def _table(self) -> dict[str, Any]:
        try:
            table = self.value.__dict__
        except Exception:  # of the program: a proxy may have no object
            return {}
        return table if type(table) is dict else {}


@functools.cache
def _is_read_out_of_sight(kind: type) -> bool:
    """Return True if operators and built-in functions run the code of a class."""
    return any(hasattr(kind, f"__{name}__") for name in _OPERATORS)


@functools.cache
def _slots_of(kind: type) -> dict[str, Any]:
    every = (one for base in reversed(kind.__mro__) for one in vars(base).items())
    return {name: one for name, one in every if isinstance(one, types.MemberDescriptorType)}


def _in_slot(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return UNKNOWN


_HELD_AS: dict[type, type[_Fixed]] = {
    tuple: _Fixed,
    frozenset: _Fixed,
    functools.partial: _Partial,
    list: _List,
    collections.deque: _List,
    collections.OrderedDict: _Dict,
    dict: _Dict,
    set: _Set,
    bytearray: _Bytes,
    array.array: _Bytes,
    contextvars.ContextVar: _Variable,
}


@functools.cache
def _kind_of(kind: type) -> type[_Fixed] | None:
    """Return how to look into values of a type, or None if their contents stay."""
    if issubclass(kind, _CLOSED):
        return None
    held = next((held for base, held in _HELD_AS.items() if issubclass(kind, base)), None)
    if held is not None:
        return held
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.ndarray):
        return _Array
    return None if is_trusted(kind) and kind.__module__ not in _HOLDERS else _Object
