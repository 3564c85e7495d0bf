"""What is left in one's hand when a model was changed: a way back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol


class Handle(Protocol):
    """An applied technique."""

    def revert(self) -> None:
        """Make the model what it was."""
        ...


class Handles:
    """Several applied techniques or changed modules, reverted together."""

    def __init__(self) -> None:
        self._handles: list[Handle] = []

    def add(self, handle: Handle) -> None:
        """One more."""
        self._handles.append(handle)

    def revert(self) -> None:
        """Make everything what it was, the last first."""
        while self._handles:
            self._handles.pop().revert()


def all_or_none(places: Iterable[str], change: Callable[[str], Handle]) -> Handle:
    """Change what is at each place. If one fails all are as they were, and its error is raised."""
    handles = Handles()
    try:
        for place in places:
            handles.add(change(place))
    except BaseException:
        handles.revert()
        raise
    return handles
