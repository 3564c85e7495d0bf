"""Attach to an exception the place of the plan that was running when it was raised."""

from __future__ import annotations

import contextlib

_KEY = "_torchtrim_place"
_UNMATCHED = "CheckpointError"
_DEFECT = "technique "
_last_again = [""]


def defect(technique: str) -> str:
    """Return the marker used instead of a place if a technique fails by its own defect."""
    return _DEFECT + technique


def defective(place: str) -> str:
    """Return the technique named by a `defect` marker, or an empty string for a place."""
    return place.removeprefix(_DEFECT) if place.startswith(_DEFECT) else ""


def note(error: BaseException, where: str) -> None:
    """Attach a place to an exception that passes through it. The innermost place wins."""
    if where and not hasattr(error, _KEY):
        with contextlib.suppress(AttributeError, TypeError):
            setattr(error, _KEY, where)


def tell(where: str, error: BaseException | None) -> None:
    """Handle an exception that passes through a rerun place, or, with None, the end of its run.

    Records the last place that ran: checkpoint compares saved tensors only after the rerun.
    """
    if error is None:
        _last_again[0] = where
    else:
        note(error, where)


def place_of(error: BaseException) -> str:
    """Return the place of the error, or an empty string if unknown."""
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
