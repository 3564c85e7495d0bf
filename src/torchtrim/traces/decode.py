"""A trace file -> events: decompressed within a limit, fast first; malformed ones are left out, and said."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from torchtrim.errors import UnreadableInput
from torchtrim.records.files import read_bounded, without_collection
from torchtrim.records.trace_events import Event

MOST_BYTES = 2**30
_GZIP = b"\x1f\x8b"
_PIECE = 2**24
_RATIO_FROM = 2**26
_MOST_RATIO = 250  # Far above what a trace reaches; deflate itself goes up to 1032.


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


_VERSIONS = (
    "cuda_runtime_version",
    "cuda_driver_version",
    "cupti_version",
    "hip_runtime_version",
    "hip_driver_version",
    "roctracer_version",
    "pytorch_version",
    "torch_version",
)
_NO_NUMBER = re.compile(rb'("(?:[^"\\]|\\.)*+")|(?<![\w.])-?(?:NaN|nan|Infinity|inf)(?![\w.])')
_EVENT_START = re.compile(rb',\s*\{\s*"(?:ph|name|cat|pid|ts|args)"\s*:')
_TAIL = 2**20
MOST_OBJECTS = 12_000_000  # Arbitrary; a trace of 1 GiB has fewer, unless its objects are empty.
_MOST_COMMAS = 30_000_000
"""Arbitrary; the tolerant reader keeps plain dicts, which are larger than events."""


class FileMeta(Struct):
    """What a trace says about itself, as it came: nothing of it can be relied on."""

    devices: Any = field(default=None, name="deviceProperties")
    distributed: Any = field(default=None, name="distributedInfo")
    metadata: Any = None
    versions: dict[str, Any] = {}


class _TraceFile(Struct):
    events: list[Event] = field(name="traceEvents")


class _LooseFile(Struct):
    events: list[msgspec.Raw] = field(name="traceEvents")


class Decoded(Struct):
    """The events of a trace, what it says about itself, and what had to be repaired to read it."""

    events: list[Event]
    meta: FileMeta
    notes: list[str]


def decode(data: bytes | bytearray, source: str) -> Decoded:
    """The events. Raises `UnreadableInput` for what is no trace, or has more than 12 million objects."""
    if data.count(b"{") > MOST_OBJECTS:
        raise UnreadableInput(
            f"{source} has more than {MOST_OBJECTS} objects, the most that is read. "
            "Profile fewer steps: torch.profiler.schedule(wait=1, warmup=1, active=1)."
        )
    notes: list[str] = []
    with without_collection():
        try:
            return _decode(data, source, notes)
        except RecursionError:
            raise UnreadableInput(
                f"{source} is nested too deeply to be a trace. Something else wrote it."
            ) from None


def _decode(data: bytes | bytearray, source: str, notes: list[str]) -> Decoded:
    try:
        return _readable(data, source, notes)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if isinstance(error, msgspec.ValidationError):
            raise _no_trace(source, error) from None
        wrong = error
    without = _NO_NUMBER.sub(lambda match: match[1] or b"null", data)
    if without != data:
        notes.append("The file has NaN or infinity, which JSON does not; read as nothing.")
        try:
            return _readable(without, source, notes)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            wrong = error
    return _recovered(without, source, notes, wrong)


def _recovered(data: bytes | bytearray, source: str, notes: list[str], wrong: Exception) -> Decoded:
    """A file that ends in the middle, read up to its last whole event."""
    if data.rstrip()[-1:] in (b"}", b"]") and "truncated" not in str(wrong):
        raise _no_trace(source, wrong)
    begin = max(0, len(data) - _TAIL)
    starts = [begin + match.start() for match in _EVENT_START.finditer(data, begin)]
    closing = b"]" if data.lstrip()[:1] == b"[" else b"]}"
    for start in reversed(starts[-3:]):
        try:
            found = _readable(data[:start] + closing, source, notes)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        notes.append(
            f"The file is cut off after {start} bytes; the {len(found.events)} whole events "
            "before that were read."
        )
        return found
    raise _no_trace(source, wrong)


def _no_trace(source: str, error: Exception) -> UnreadableInput:
    return UnreadableInput(
        f"{source} is no readable profiler trace: {error}. A trace is what "
        "torch.profiler's export_chrome_trace() or tensorboard_trace_handler() writes."
    )


def _readable(data: bytes | bytearray, source: str, notes: list[str]) -> Decoded:
    bare = data[:64].lstrip()[:1] == b"["
    try:
        events = _bare(data) if bare else msgspec.json.decode(data, type=_TraceFile).events
    except msgspec.ValidationError:
        if data.count(b",") > _MOST_COMMAS:
            raise
        events = _tolerant(data, bare, notes)
    return Decoded(events, FileMeta() if bare else _meta(data), notes)


def _bare(data: bytes | bytearray) -> list[Event]:
    return msgspec.json.decode(data, type=list[Event])


def _tolerant(data: bytes | bytearray, bare: bool, notes: list[str]) -> list[Event]:
    if bare:
        raw = msgspec.json.decode(data, type=list[msgspec.Raw])
    else:
        raw = msgspec.json.decode(data, type=_LooseFile).events
    decoder = msgspec.json.Decoder(Event)
    events, first = [], ""
    for one in raw:
        try:
            events.append(decoder.decode(one))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            first = first or str(error)
    lost = len(raw) - len(events)
    notes.append(
        f"{lost} of {len(raw)} events are malformed and were left out; the first: {first}."
    )
    return events


def _meta(data: bytes | bytearray) -> FileMeta:
    try:
        meta = msgspec.json.decode(data, type=FileMeta)
        names = [name for name in _VERSIONS if name.encode() in data]
        if names:
            wanted = msgspec.defstruct("Versions", [(name, Any, None) for name in names])
            found = msgspec.structs.asdict(msgspec.json.decode(data, type=wanted))
            meta.versions = {name: value for name, value in found.items() if value is not None}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return FileMeta()
    return meta
