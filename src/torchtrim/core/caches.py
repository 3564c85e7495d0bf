"""The user's cache folder, for results computed once per machine."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def folder() -> Path:
    """Return the cache folder of this user. It may not exist yet."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "torchtrim"


def write(path: Path, content: bytes) -> None:
    """Write a file atomically. Ignore errors of the file system, since the cache is optional."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(number, "wb") as file:
                file.write(content)
            Path(name).replace(path)
        except OSError:
            Path(name).unlink(missing_ok=True)


def compiler(**options: Any) -> Callable[[Any], Any]:
    """Return `numba.njit` with its compiled code in the cache folder, or in `NUMBA_CACHE_DIR` if set."""
    numba: Any = import_module("numba")

    def compiled(function: Any) -> Any:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = before or str(folder() / "numba")
        try:
            return numba.njit(cache=True, **options)(function)
        finally:
            numba.config.CACHE_DIR = before

    return compiled
