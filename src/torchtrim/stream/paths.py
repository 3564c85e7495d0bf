"""Where a tensor is in a state: attribute names, keys and places; and patterns of such paths."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

Path = tuple[Any, ...]
_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType)
ANY = "*"


class Place(int):
    """A place in a list or tuple, as a part of a path."""

    def __repr__(self) -> str:
        return f"[{int(self)}]"


def tensors_in(state: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    """Every tensor that an object holds, with the path to it.

    Goes through dicts, lists, tuples, sets, deques and the attributes of objects, each once. Modules are not
    entered, except `state` itself: of it parameters, buffers and submodules are left out.
    """
    yield from _walk(state, (), set(), top=True)


def pattern_of(path: Path) -> str:
    """A path with its numbers as `*`: `('outputs', 3, 'mask', [1])` is `outputs.*.mask[1]`."""
    words = ""
    for part in path:
        if isinstance(part, Place):
            words += repr(part)
        else:
            text = ANY if isinstance(part, int) else str(part)
            words += f".{text}" if words else text
    return words


def holder_of(state: Any, path: Path) -> Any:
    """What holds the value at the end of a path; `None` if the path leads nowhere."""
    for part in path[:-1]:
        state = _step(state, part)
        if state is None:
            return None
    return state


def put(holder: Any, part: Any, value: Any) -> None:
    """Write a value where a part of a path leads. What is in a tuple or a set stays."""
    if isinstance(holder, dict):
        dict.__setitem__(holder, part, value)
    elif isinstance(holder, list | deque):
        holder[part] = value
    elif not isinstance(holder, tuple | set | frozenset):
        setattr(holder, part, value)


def _step(state: Any, part: Any) -> Any:
    if isinstance(state, dict):
        return state.get(part)
    if isinstance(state, list | tuple | deque):
        return state[part] if part < len(state) else None
    return getattr(state, str(part), None)


def _walk(
    value: Any, path: Path, seen: set[int], *, top: bool = False
) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if isinstance(value, nn.Module):
        if not top:
            return
    elif isinstance(value, _LEAVES) or callable(value):
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    for name, one in _parts(value):
        yield from _walk(one, (*path, name), seen)


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from list(value.items())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((Place(number), one) for number, one in enumerate(list(value)))
    else:
        hidden = {"_parameters", "_buffers", "_modules"} if isinstance(value, nn.Module) else set()
        for name, one in list(getattr(value, "__dict__", {}).items()):
            if name not in hidden:
                yield name, one
