"""The variables of a script: of its functions that run, and of their modules."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torchtrim.dispatch.places import Places


def scopes(places: Places, frame: FrameType | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The variables of the script's functions that run, the inner ones first, and of their modules."""
    seen: set[str] = set()
    while frame is not None:
        if places.is_users((frame.f_code, frame.f_lasti)):
            module = str(frame.f_globals.get("__name__"))
            name = frame.f_code.co_name
            if name not in seen and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                seen.add(name)
                yield name, locals_of(frame)
            if module not in seen:
                seen.add(module)
                yield module, frame.f_globals
        frame = frame.f_back


def locals_of(frame: FrameType) -> dict[str, Any]:
    """The variables of a function that runs, or that waits at a `yield`.

    Before Python 3.13 the frame keeps what is read here, and so what the variables hold. That is undone,
    unless the script has it too, by `locals()`.
    """
    kept = frame.f_locals
    found = dict(kept)
    if sys.version_info < (3, 13) and sys.getrefcount(kept) <= 3:
        kept.clear()
    return found
