"""Arguments and results of a call as leaves, and put together again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

Leaves = list[Any]


def leaves_of(value: Any) -> Leaves:
    """All that is in nested tuples, lists, dicts and dataclasses, in their order."""
    found: Leaves = []
    mapped(value, found.append)
    return found


def filled(value: Any, leaves: Iterable[Any]) -> Any:
    """The same containers with other leaves, as many as `leaves_of` gave."""
    rest = iter(leaves)
    return mapped(value, lambda _: next(rest))


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """The containers with what the function gives for each leaf; the value itself is not changed."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple):
        items = [mapped(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        twin: Any = copy.copy(value)
        twin[:] = [mapped(item, function) for item in value]
        return twin
    if isinstance(value, dict):
        twin = copy.copy(value)
        for key, item in value.items():
            twin[key] = mapped(item, function)
        return twin
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(twin, field.name, mapped(getattr(value, field.name), function))
        return twin
    return function(value)
