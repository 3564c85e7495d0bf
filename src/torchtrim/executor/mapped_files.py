"""Memory-mapped files of a process: memory that the kernel may put on a disk, gone when the process is.

A file has no name from the moment that it is mapped, so nothing is left of it however the process ends. A
process that is killed before that leaves a file that nobody has locked; the next one removes it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

import torch

from torchtrim.core import caches
from torchtrim.core.units import format_bytes
from torchtrim.errors import ApplyFailed

FOLDER = "TORCHTRIM_SCRATCH"
"""The environment variable that names the folder for these files."""
_SUFFIX = ".scratch"


def folder() -> Path:
    """Where the files are for the moment that they have names."""
    return Path(os.environ.get(FOLDER) or caches.folder() / "scratch")


def mapped(size: int) -> torch.Tensor:
    """So many bytes of a file of their own, which lasts as long as they do.

    Raises `ApplyFailed` where there is no room, or no file can be written.
    """
    where = folder()
    try:
        where.mkdir(parents=True, exist_ok=True)
        tidy(where)
        return _made(where, size)
    except OSError as error:
        raise ApplyFailed(
            f"no memory-mapped file of {format_bytes(size)} can be made in {where}: {error.strerror}. "
            f"Name a folder with room in the environment variable {FOLDER}, or give more --host-memory."
        ) from error


def tidy(where: Path) -> None:
    """Remove what killed processes have left."""
    for path in where.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            number = os.open(path, os.O_RDWR)
            try:
                _lock(number)
                path.unlink(missing_ok=True)
            finally:
                os.close(number)


def _made(where: Path, size: int) -> torch.Tensor:
    number, name = tempfile.mkstemp(dir=where, prefix=f"{os.getpid()}-", suffix=_SUFFIX)
    try:
        _lock(number)
        _reserve(number, size)
        path = f"/proc/self/fd/{number}" if sys.platform == "linux" else name
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    finally:
        with contextlib.suppress(OSError):
            Path(name).unlink(missing_ok=True)
        os.close(number)


def _lock(number: int) -> None:
    """Say that a file is somebody's. Raises `OSError` if it is another's."""
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _reserve(number: int, size: int) -> None:
    """Have the disk's room, so that a full one is an error here and no crash later."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(number, 0, size)
    else:
        os.truncate(number, size)
