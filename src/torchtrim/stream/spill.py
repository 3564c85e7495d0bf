"""Spill a stream's state to host memory or to memory-mapped files."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch

from torchtrim.errors import TorchtrimError, UsageError

_BLOCK = 2**20  # Arbitrary: zeros written per call where posix_fallocate is missing.


class SpillFailed(TorchtrimError):
    """No room to spill. Nothing was lost: the data is still in memory."""


class Spill(Protocol):
    """Stores bytes and returns them."""

    def put(self, data: torch.Tensor) -> Any:
        """Store a copy of one-dimensional `uint8` data and return a token. Raises `SpillFailed`."""

    def get(self, token: Any) -> torch.Tensor:
        """Return the bytes, on the host."""

    def drop(self, token: Any) -> None:
        """Release the bytes."""


class HostSpill:
    """Spills state of a device to host memory, at most `most_bytes`."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most = most_bytes
        self.bytes = 0

    def put(self, data: torch.Tensor) -> torch.Tensor:
        """Store a copy of the bytes. Raises `SpillFailed` above `most_bytes`."""
        _check_room(self.bytes + data.numel(), self._most, "the host's memory")
        self.bytes += data.numel()
        return data.to("cpu", copy=True)

    def get(self, token: torch.Tensor) -> torch.Tensor:
        """Return the bytes."""
        return token

    def drop(self, token: torch.Tensor) -> None:
        """Release the bytes."""
        self.bytes -= token.numel()


class FileSpill:
    """Spills to memory-mapped files in a new directory under `directory`, at most `most_bytes`.

    Space is reserved before the first write, so a full disk raises `SpillFailed` instead of crashing. The
    directory is removed by `close()`, with this object, or at a normal exit of the process.
    """

    def __init__(self, directory: str | Path, most_bytes: int | None = None) -> None:
        if not Path(directory).is_dir():
            raise UsageError(
                f"cannot spill to {directory}: not a directory. Create it, or pass an existing one."
            )
        self._home = Path(tempfile.mkdtemp(prefix="torchtrim-spill-", dir=directory))
        self._close = weakref.finalize(self, shutil.rmtree, self._home, ignore_errors=True)
        self._most = most_bytes
        self._number = 0
        self.bytes = 0

    def put(self, data: torch.Tensor) -> tuple[Path, int]:
        """Write the bytes to a new file. Raises `SpillFailed` if the disk or the limit is full."""
        size = data.numel()
        _check_room(self.bytes + size, self._most, str(self._home))
        path = self._home / str(self._number)
        self._number += 1
        try:
            with path.open("wb") as file:
                _reserve(file, size)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise SpillFailed(
                f"could not spill {size} bytes to {path.parent}: {error.strerror}. Nothing was lost: the "
                "state is still in memory. Free space there, spill elsewhere, or raise the budget."
            ) from error
        if size:
            torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8).copy_(data)
        self.bytes += size
        return path, size

    def get(self, token: tuple[Path, int]) -> torch.Tensor:
        """Return the bytes, copied from the file."""
        path, size = token
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).clone()

    def drop(self, token: tuple[Path, int]) -> None:
        """Remove the file."""
        path, size = token
        path.unlink(missing_ok=True)
        self.bytes -= size

    def close(self) -> None:
        """Remove all spilled data."""
        self._close()


def _reserve(file: BinaryIO, size: int) -> None:
    if size and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    for begin in range(0, size, _BLOCK):
        file.write(bytes(min(_BLOCK, size - begin)))


def _check_room(wanted: int, most: int | None, where: str) -> None:
    if most is not None and wanted > most:
        raise SpillFailed(
            f"spilling would put {wanted} bytes into {where}, above the limit of {most}. Nothing was lost: "
            "the state is still in memory. Raise the limit or the budget."
        )
