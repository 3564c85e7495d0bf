"""Memory-mapped temporary files, which the kernel can write to disk and which vanish with the process.

A file is unlinked right after its mapping, so it disappears with the process, however that ends. A process
killed in between leaves an unlocked file, which the next process removes.
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
"""Environment variable with the folder of these files."""
_SUFFIX = ".scratch"


def folder() -> Path:
    """Return the folder of the files."""
    return Path(os.environ.get(FOLDER) or caches.folder() / "scratch")


def mapped(size: int) -> torch.Tensor:
    """Return `size` bytes mapped to a new file that lives as long as the tensor.

    Raises `ApplyFailed` if the disk is full or the file cannot be written.
    """
    where = folder()
    try:
        where.mkdir(parents=True, exist_ok=True)
        tidy(where)
        return _mapped(where, size)
    except OSError as error:
        raise ApplyFailed(
            f"cannot create a memory-mapped file of {format_bytes(size)} in {where}: {error.strerror}. "
            f"Set the environment variable {FOLDER} to a folder with room, or raise --host-memory."
        ) from error


def tidy(where: Path) -> None:
    """Remove files left by killed processes."""
    for path in where.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            number = os.open(path, os.O_RDWR)
            try:
                _lock(number)
                path.unlink(missing_ok=True)
            finally:
                os.close(number)


def _mapped(where: Path, size: int) -> torch.Tensor:
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
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _reserve(number: int, size: int) -> None:
    """Reserve the disk space, so that a full disk raises an error here instead of crashing later."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(number, 0, size)
    else:
        os.truncate(number, size)
