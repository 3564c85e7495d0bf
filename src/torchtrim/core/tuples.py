"""Tuples with other items."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def with_items(value: tuple[Any, ...], items: Iterable[Any]) -> Any:
    """Return a tuple of the same class with other items.

    The constructor of a named tuple may check them, as that of `PackedSequence` does, and is left out.
    """
    if not hasattr(value, "_fields"):
        return type(value)(items)
    made = tuple.__new__(type(value), items)
    if hasattr(value, "__dict__"):
        vars(made).update(vars(value))
    return made
