"""Results computed once on a machine are kept in the user's cache folder, never in the package."""

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
    """Where this user's programs keep what can be made again; it need not exist."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "torchtrim"


def write(path: Path, content: bytes) -> None:
    """Put a file there as a whole or not at all. Where nothing can be written nothing is kept."""
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
    """`numba.njit`, which keeps what it compiles in the cache folder, or where `NUMBA_CACHE_DIR` says."""
    numba: Any = import_module("numba")

    def compiled(function: Any) -> Any:
        given = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = given or str(folder() / "numba")
        try:
            return numba.njit(cache=True, **options)(function)
        finally:
            numba.config.CACHE_DIR = given

    return compiled
