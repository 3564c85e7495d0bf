"""What is left in one's hand when a model was changed: a way back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from torchtrim.errors import ApplyFailed
from torchtrim.executor.failing import note


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

    def check_settled(self) -> None:
        """Raise `ApplyFailed` if a technique is ahead of the program, its updates awaiting their `step`."""
        for handle in self._handles:
            check = getattr(handle, "check_settled", None)
            if check is not None:
                check()

    def revert(self) -> None:
        """Make everything what it was, the last first."""
        while self._handles:
            self._handles.pop().revert()


def _changed(place: str, change: Callable[[str], Handle]) -> Handle:
    try:
        return change(place)
    except ApplyFailed as error:
        note(error, place)
        raise


def all_or_none(places: Iterable[str], change: Callable[[str], Handle]) -> Handle:
    """Change what is at each place. If one fails all are as they were, and its error is raised, and knows the
    place: a plan can be made without it."""
    handles = Handles()
    try:
        for place in places:
            handles.add(_changed(place, change))
    except BaseException:
        handles.revert()
        raise
    return handles
