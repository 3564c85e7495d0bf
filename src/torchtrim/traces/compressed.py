"""The bytes of a trace file, decompressed within a limit."""

from __future__ import annotations

import zlib
from pathlib import Path

from torchtrim.errors import UnreadableInput
from torchtrim.records.files import read_bounded

MOST_BYTES = 2**30
_GZIP = b"\x1f\x8b"
_PIECE = 2**24
_RATIO_FROM = 2**26
_MOST_RATIO = 250


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes | bytearray:
    """The trace's JSON. Raises `UnreadableInput` for what is missing, damaged or larger than `most` bytes.

    Gzip is known by its first bytes, not by the name. JSON of a profiler shrinks 15 to 40 times; what
    unpacks to more than 250 times its size is refused once it has shown that over 64 MiB.
    """
    if path.is_dir() or (path.exists() and not path.is_file()):
        raise UnreadableInput(f"{path} is no file. Name a trace, or a folder that holds traces.")
    data = read_bounded(path, most)
    if not data:
        raise UnreadableInput(f"{path} is empty. The profiler did not finish; record it again.")
    return _unpacked(data, path, most) if data.startswith(_GZIP) else data


def _unpacked(data: bytes, path: Path, most: int) -> bytearray:
    unpacked = bytearray()
    rest = data
    while rest.startswith(_GZIP):
        stream = zlib.decompressobj(wbits=31)
        while not stream.eof:
            unpacked += _piece(stream, rest, path, len(unpacked))
            rest = stream.unconsumed_tail
            _check_size(len(unpacked), len(data) - len(rest), path, most)
        rest = stream.unused_data.lstrip(b"\0")
    return unpacked


def _piece(stream: zlib._Decompress, rest: bytes, path: Path, size: int) -> bytes:
    try:
        piece = stream.decompress(rest, _PIECE)
    except zlib.error as error:
        raise UnreadableInput(
            f"{path} is damaged: its gzip data cannot be unpacked after {size} bytes ({error}). "
            "Copy it again from where it was recorded."
        ) from None
    if not piece and not stream.eof and not stream.unconsumed_tail:
        raise UnreadableInput(
            f"{path} is cut off: its gzip data end after {size} unpacked bytes. "
            "Copy it again, or wait until the profiler has written it."
        )
    return piece


def _check_size(size: int, consumed: int, path: Path, most: int) -> None:
    if size > most:
        raise UnreadableInput(
            f"{path} unpacks to more than {most} bytes, the most that is read. "
            "Profile fewer steps: torch.profiler.schedule(wait=1, warmup=1, active=1)."
        )
    if size > _RATIO_FROM and size > _MOST_RATIO * max(consumed, 1):
        raise UnreadableInput(
            f"{path} unpacks to more than {_MOST_RATIO} times its size, which no trace does. "
            "It is not read further."
        )
