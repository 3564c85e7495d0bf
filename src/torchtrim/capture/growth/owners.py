"""Finds the expression that leads to an object, such as `session.outputs[0]['frames']`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import traceback
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from torchtrim.capture.code.live import UNKNOWN, content
from torchtrim.dispatch.places import Places, slots_of, variables_of

_LEAVES = (
    *(str, bytes, int, float, complex, bool, type(None), torch.Tensor, torch.dtype, torch.device),
    *(types.ModuleType, types.CodeType, types.BuiltinFunctionType, range),
)
_MOST_VISITED = 400_000
"""Objects. Arbitrary: a search takes about a second at most."""
_MOST_ELEMENTS = 256
"""Arbitrary: elements of one container that are searched; long ones are data."""

_SEQUENCES: tuple[Any, ...] = (list, tuple, set, frozenset, deque)
_ROOMS = ("api", "cli", "workflows", "capture", "dispatch", "evidence", "runner", "certify")
_OWN = tuple(f"torchtrim.{room}" for room in _ROOMS)
_PARTS_OF_MODULES = ("_modules", "_parameters", "_buffers")


class NamePath(NamedTuple):
    """The expression that leads to an object, and the classes of the objects on the path."""

    name: str
    classes: tuple[str, ...]


class _Step(NamedTuple):
    thing: Any
    before: _Step | None
    part: str


def find_owners(wanted: Iterable[int], roots: Iterable[tuple[str, Any]]) -> dict[int, NamePath]:
    """Return the shortest path to each object with one of these ids, from the first root that leads to it."""
    missing, paths = set(wanted), {}
    seen: set[int] = set()
    for name, root in roots:
        waiting = deque([_Step(root, None, name)])
        while waiting and missing and len(seen) < _MOST_VISITED:
            step = waiting.popleft()
            if id(step.thing) in missing:
                missing.discard(id(step.thing))
                paths[id(step.thing)] = _path(step)
            for part, thing in _parts(step.thing):
                if id(thing) in missing or (id(thing) not in seen and not _is_leaf(thing)):
                    seen.add(id(thing))
                    waiting.append(_Step(thing, step, part))
    return paths


def roots_here(places: Places, modules: Iterable[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield the roots of names: variables of running functions, the user's first, modules, globals."""
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))][::-1]
    users = [one for one in frames if places.is_users((one.f_code, one.f_lasti))]
    others = [one for one in frames if one not in users]
    for one in users:
        yield from _named(variables_of(one))
    for module in modules:
        yield type(module).__name__, module
    for one in others:
        if places.is_of_a_library((one.f_code, one.f_lasti)):
            yield from _named(variables_of(one))
    for name, source in list(sys.modules.items()):
        if isinstance(source, types.ModuleType) and not _is_own(name):
            short = name.rpartition(".")[2]
            yield from ((f"{short}.{key}", value) for key, value in list(vars(source).items()))


def _named(variables: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    plain = [(name, one) for name, one in list(variables.items()) if not name.startswith("__")]
    yield from sorted(plain, key=lambda item: item[0] == "self")


def _is_own(name: str) -> bool:
    return name.startswith(_OWN)


def _is_leaf(thing: Any) -> bool:
    return _is(thing, _LEAVES) or _is_own(str(getattr(type(thing), "__module__", "")))


def _is(thing: Any, kinds: Any) -> bool:
    """Like `isinstance`, but ignoring an object's own `__class__`."""
    return issubclass(type(thing), kinds)


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the children of an object without running its code: a subclass may override access."""
    if _is(thing, _LEAVES):
        return
    if _is(thing, dict):
        yield from ((f"[{_key(key)}]", one) for key, one in list(dict.items(thing)))
    for kind in _SEQUENCES:
        if _is(thing, kind):
            some = list(itertools.islice(kind.__iter__(thing), _MOST_ELEMENTS))
            yield from ((f"[{number}]", one) for number, one in enumerate(some))
    if _is(thing, nn.Module):
        for name in _PARTS_OF_MODULES:
            yield from ((f".{key}", one) for key, one in list(vars(thing)[name].items()))
    yield from _attributes(thing)


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    if _is(thing, functools.partial):
        yield ".func", thing.func
    variables = None
    with contextlib.suppress(AttributeError):
        variables = object.__getattribute__(thing, "__dict__")
    for name, one in list(variables.items()) if type(variables) is dict else ():
        if name not in _PARTS_OF_MODULES:
            yield f".{name}", one
    yield from ((f".{name}", one) for name, one in slots_of(thing))
    if _is(thing, types.MethodType):
        yield ".__self__", thing.__self__
    elif _is(thing, types.FunctionType):
        cells = zip(thing.__code__.co_freevars, map(content, thing.__closure__ or ()), strict=False)
        yield from ((f".{name}", one) for name, one in cells if one is not UNKNOWN)
    elif _is(thing, types.GeneratorType) and thing.gi_frame is not None:
        yield from ((f".{name}", one) for name, one in variables_of(thing.gi_frame).items())


def _key(key: Any) -> str:
    return repr(key) if type(key) in (str, int, bytes) else type(key).__name__


def _path(step: _Step) -> NamePath:
    steps = [step]
    while (before := steps[-1].before) is not None:
        steps.append(before)
    classes = tuple(type(one.thing).__name__ for one in steps)
    return NamePath("".join(one.part for one in reversed(steps)), classes)
