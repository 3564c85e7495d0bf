"""A call's arguments as they are now, for a block that runs again when they may have changed."""

from __future__ import annotations

import copy
from typing import Any

import torch

from torchtrim.capture.recording import COPIED_DEPTH, SHARED

_AS_IS = (torch.Tensor, *SHARED)


def as_they_are(value: Any) -> Any:
    """The value with containers of its own; tensors and modules are shared.

    Lists, tuples, dicts, and objects with attributes, such as a cache of keys and values that each block
    makes longer. What cannot be copied, or is deeper than eight, is shared.
    """
    return _fresh(value, {}, COPIED_DEPTH)


def _fresh(value: Any, known: dict[int, Any], depth: int) -> Any:
    if isinstance(value, _AS_IS) or not depth:
        return value
    if id(value) not in known:
        known[id(value)] = value
        known[id(value)] = _copied(value, known, depth - 1)
    return known[id(value)]


def _copied(value: Any, known: dict[int, Any], depth: int) -> Any:
    if isinstance(value, tuple):
        items = [_fresh(item, known, depth) for item in value]
        same = all(a is b for a, b in zip(items, value, strict=True))
        return value if same else _tuple_like(value, items)
    if isinstance(value, (list, dict)):
        return _container(value, known, depth)
    return _object(value, known, depth) if isinstance(_attributes(value), dict) else value


def _tuple_like(value: tuple[Any, ...], items: list[Any]) -> Any:
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _container(value: Any, known: dict[int, Any], depth: int) -> Any:
    try:
        twin = copy.copy(value)
        if isinstance(value, list):
            twin[:] = [_fresh(item, known, depth) for item in value]
        else:
            for key, item in value.items():
                twin[key] = _fresh(item, known, depth)
    except Exception:
        return value
    return twin


def _object(value: Any, known: dict[int, Any], depth: int) -> Any:
    try:
        twin = copy.copy(value)
        for name, item in vars(value).items():
            vars(twin)[name] = _fresh(item, known, depth)
    except Exception:
        return value
    return twin


def _attributes(value: Any) -> Any:
    """An object's own attributes; those of functions and their like are nobody's state."""
    return None if callable(value) else getattr(value, "__dict__", None)
