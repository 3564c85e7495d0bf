"""A dict whose every way in and out can be seen."""

from __future__ import annotations

from typing import Any


class Routed(dict[Any, Any]):
    """A dict in which everything is written by `__setitem__` and taken out by `pop`.

    A plain dict's `update`, `|=`, `setdefault`, `popitem`, `del` and `clear` pass both by.
    """

    __slots__ = ()

    def update(self, *others: Any, **more: Any) -> None:
        """As of a dict."""
        for key, value in dict(*others, **more).items():
            self[key] = value

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """As of a dict."""
        if key not in self:
            self[key] = default
        return self[key]

    def popitem(self) -> tuple[Any, Any]:
        """As of a dict."""
        key = next(reversed(self))
        return key, self.pop(key)

    def __delitem__(self, key: Any) -> None:
        self.pop(key)

    def clear(self) -> None:
        """As of a dict."""
        for key in list(self):
            del self[key]
