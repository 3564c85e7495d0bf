"""Replaces attributes and restores them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    """Replaced attributes; `undo` restores the originals in reverse order."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def replace(self, owner: Any, name: str, value: Any) -> Any:
        """Set an attribute of a module or class and return its former value."""
        former = vars(owner).get(name, _ABSENT)
        inherited = getattr(owner, name, None)

        def restore() -> None:
            if vars(owner).get(name) is not value:
                return
            if former is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, former)

        setattr(owner, name, value)
        self._stack.callback(restore)
        return inherited

    def on_undo(self, action: Callable[..., Any], *args: Any) -> None:
        """Register a callback for `undo`."""
        self._stack.callback(action, *args)

    def undo(self) -> None:
        """Restore all attributes."""
        self._stack.close()
