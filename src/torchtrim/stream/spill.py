"""Where the bytes of a stream's state go when there is no room: the host's memory, or a mapped file."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch

from torchtrim.errors import TorchtrimError, UsageError

_BLOCK = 2**20


class SpillFailed(TorchtrimError):
    """There was no room to spill to. Nothing was lost: what was to be spilled is where it was."""


class Spill(Protocol):
    """Keeps bytes and gives them back."""

    def put(self, data: torch.Tensor) -> Any:
        """Keep a copy of one-dimensional `uint8` bytes. Returns a token; raises `SpillFailed`."""

    def get(self, token: Any) -> torch.Tensor:
        """The bytes, on the host."""

    def drop(self, token: Any) -> None:
        """They are not needed any more."""


class HostSpill:
    """Spills to the host's memory, at most `most_bytes` of it: for state on a device."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most = most_bytes
        self.bytes = 0

    def put(self, data: torch.Tensor) -> torch.Tensor:
        """Keep a copy of the bytes. Raises `SpillFailed` above `most_bytes`."""
        _check_room(self.bytes + data.numel(), self._most, "the host's memory")
        self.bytes += data.numel()
        return data.to("cpu", copy=True)

    def get(self, token: torch.Tensor) -> torch.Tensor:
        """The bytes."""
        return token

    def drop(self, token: torch.Tensor) -> None:
        """Let them go."""
        self.bytes -= token.numel()


class FileSpill:
    """Spills to memory-mapped files in a new directory under `directory`, at most `most_bytes` of them.

    The space is taken before a byte is written, so a full disk is a `SpillFailed` and not a crash.
    `close()` removes the directory; so does the end of this object, or an orderly end of the process.
    """

    def __init__(self, directory: str | Path, most_bytes: int | None = None) -> None:
        if not Path(directory).is_dir():
            raise UsageError(
                f"{directory} is no directory to spill to. Make it, or name one that is there and has room."
            )
        self._home = Path(tempfile.mkdtemp(prefix="torchtrim-spill-", dir=directory))
        self._close = weakref.finalize(self, shutil.rmtree, self._home, ignore_errors=True)
        self._most = most_bytes
        self._number = 0
        self.bytes = 0

    def put(self, data: torch.Tensor) -> tuple[Path, int]:
        """Write the bytes to a file of their own. Raises `SpillFailed` where there is no room."""
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
                "state is still in memory. Make room there, spill elsewhere, or raise the budget."
            ) from error
        if size:
            torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8).copy_(data)
        self.bytes += size
        return path, size

    def get(self, token: tuple[Path, int]) -> torch.Tensor:
        """The bytes, copied out of the file."""
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
        """Remove everything that was spilled."""
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
            f"spilling would put {wanted} bytes into {where}, and {most} are allowed. Nothing was lost: "
            "the state is still in memory. Allow more, or raise the budget."
        )
