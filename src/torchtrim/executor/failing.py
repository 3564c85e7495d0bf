"""Which place of a plan was running when a step failed: told by the exception itself."""

from __future__ import annotations

import contextlib

_KEY = "_torchtrim_place"
_UNMATCHED = "CheckpointError"
_DEFECT = "technique "
_last_again = [""]


def defect(technique: str) -> str:
    """What stands in the stead of a place where a technique fails by a defect of its own."""
    return _DEFECT + technique


def defective(place: str) -> str:
    """The technique of which `defect` is; empty for a place."""
    return place.removeprefix(_DEFECT) if place.startswith(_DEFECT) else ""


def note(error: BaseException, where: str) -> None:
    """An exception passes through a changed place; the innermost counts."""
    if where and not hasattr(error, _KEY):
        with contextlib.suppress(AttributeError, TypeError):
            setattr(error, _KEY, where)


def ran_again(where: str) -> None:
    """A place has run again to its end; only then is it seen whether it saved what it saved at first."""
    _last_again[0] = where


class Place:
    """A changed place that tells of what happens in it (`techniques.recompute.rerun.Untold`)."""

    def __init__(self, where: str) -> None:
        self._where = where

    def failed(self, error: BaseException) -> None:
        """An exception passes through it."""
        note(error, self._where)

    def has_run(self) -> None:
        """It has run, at first or again."""
        ran_again(self._where)


def place_of(error: BaseException) -> str:
    """The place at which it failed; empty where that is not known."""
    seen: set[int] = set()
    step: BaseException | None = error
    while step is not None and id(step) not in seen:
        seen.add(id(step))
        if type(step).__name__ == _UNMATCHED:
            return _last_again[0]
        if where := getattr(step, _KEY, ""):
            return str(where)
        step = step.__cause__ or step.__context__
    return ""
