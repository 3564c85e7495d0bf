"""Reads a trace file into a `Trace`: host and device events in order, on one clock that starts at 0.

Decompresses within a limit and decodes the JSON fast; malformed events are left out and noted.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from itertools import islice
from math import isfinite
from pathlib import Path
from statistics import median_low
from typing import Any

import msgspec
from msgspec import Struct, field

from torchtrim.errors import UnreadableInput, Unsupported, UsageError
from torchtrim.records.files import read_bounded, without_collection
from torchtrim.records.trace import Args, Event, Trace

MOST_BYTES = 2**30  # Arbitrary: a few steps of a large model are tens of MiB.
_GZIP = b"\x1f\x8b"
_PIECE = 2**24  # Arbitrary: bounds the memory of one call of zlib.
_RATIO_FROM = 2**26  # Small files may shrink more.
_MOST_RATIO = 250  # Far above what a trace reaches; deflate itself goes up to 1032.


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes | bytearray:
    """Return the trace's JSON. Raises `UnreadableInput` if it is missing, damaged or over `most` bytes.

    Gzip is detected by its first bytes, not by the file's name. A profiler's JSON shrinks 15 to 40 times;
    data that unpack to more than 250 times their size are refused after the first 64 MiB.
    """
    if path.is_dir() or (path.exists() and not path.is_file()):
        raise UnreadableInput(f"{path} is not a file. Name a trace, or a folder that holds traces.")
    data = read_bounded(path, most)
    if not data:
        raise UnreadableInput(f"{path} is empty. The profiler did not finish; record it again.")
    if not data.startswith(_GZIP):
        return data
    unpacked, rest = bytearray(), data
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
_TAIL = 2**20  # Arbitrary: longer than any event.
MOST_OBJECTS = 12_000_000  # Arbitrary; a trace of 1 GiB has fewer, unless its objects are empty.
_MOST_COMMAS = 30_000_000
"""Arbitrary; the tolerant reader keeps plain dicts, which are larger than events."""


class FileMeta(Struct):
    """A trace's own metadata, unchecked."""

    devices: Any = field(default=None, name="deviceProperties")
    distributed: Any = field(default=None, name="distributedInfo")
    metadata: Any = None
    versions: dict[str, Any] = {}


class _TraceFile(Struct):
    events: list[Event] = field(name="traceEvents")


class _LooseFile(Struct):
    events: list[msgspec.Raw] = field(name="traceEvents")


class Decoded(Struct):
    """The events of a trace, its metadata, and notes on repairs."""

    events: list[Event]
    meta: FileMeta
    notes: list[str]


def decode(data: bytes | bytearray, source: str) -> Decoded:
    """Decode the events. Raises `UnreadableInput` for a file that is not a trace or has over 12 million
    objects."""
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
        notes.append("The file has NaN or infinity, which are not JSON; they were read as null.")
        try:
            return _readable(without, source, notes)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            wrong = error
    return _recovered(without, source, notes, wrong)


def _recovered(data: bytes | bytearray, source: str, notes: list[str], wrong: Exception) -> Decoded:
    """Read a truncated file up to its last whole event."""
    if data.rstrip()[-1:] in (b"}", b"]") and "truncated" not in str(wrong):
        raise _no_trace(source, wrong)
    begin = max(0, len(data) - _TAIL)
    starts = [begin + match.start() for match in _EVENT_START.finditer(data, begin)]
    closing = b"]" if data.lstrip()[:1] == b"[" else b"]}"
    for start in reversed(starts[-3:]):
        try:
            decoded = _readable(data[:start] + closing, source, notes)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        notes.append(
            f"The file is cut off after {start} bytes; the {len(decoded.events)} whole events "
            "before that were read."
        )
        return decoded
    raise _no_trace(source, wrong)


def _no_trace(source: str, error: Exception) -> UnreadableInput:
    return UnreadableInput(
        f"{source} is not a readable profiler trace: {error}. A trace is what "
        "torch.profiler's export_chrome_trace() or tensorboard_trace_handler() writes."
    )


def _readable(data: bytes | bytearray, source: str, notes: list[str]) -> Decoded:
    bare = data[:64].lstrip()[:1] == b"["
    try:
        if bare:
            events = msgspec.json.decode(data, type=list[Event])
        else:
            events = msgspec.json.decode(data, type=_TraceFile).events
    except msgspec.ValidationError:
        if data.count(b",") > _MOST_COMMAS:
            raise
        if bare:
            raw = msgspec.json.decode(data, type=list[msgspec.Raw])
        else:
            raw = msgspec.json.decode(data, type=_LooseFile).events
        events = _tolerant(raw, notes)
    return Decoded(events, FileMeta() if bare else _meta(data), notes)


def _tolerant(raw: list[msgspec.Raw], notes: list[str]) -> list[Event]:
    decoder = msgspec.json.Decoder(Event)
    events, first = [], ""
    for event in raw:
        try:
            events.append(decoder.decode(event))
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


_KINDS = {
    "cpu_op": "operators",
    "operator": "operators",
    "user_annotation": "annotations",
    "python_function": "frames",
    "cuda_runtime": "calls",
    "cuda_driver": "calls",
    "hip_runtime": "calls",
    "runtime": "calls",
    "kernel": "activities",
    "gpu_memcpy": "activities",
    "gpu_memset": "activities",
    "memcpy": "activities",
    "memset": "activities",
    "cuda_sync": "waits",
}
_FURTHEST_US = 86_400e6  # A day: events further from the others have broken clocks.
_PACKAGES = ("torch", "transformers", "diffusers", "accelerate", "lightning", "torchmetrics")
_PACKAGE = re.compile(r"([A-Za-z0-9_.-]+)==(\S{1,40})")
_MOST_TEXT = 200  # Arbitrary; names of devices and versions are shorter.
_EMPTY = Args()


def read_trace(path: Path, most: int = MOST_BYTES) -> Trace:
    """Read one trace.

    Raises `UnreadableInput` for a damaged or hostile file or one that is not a trace, `Unsupported` for a
    trace without device activities.
    """
    source = str(path)
    decoded = decode(read_bytes(path, most), source)
    notes = decoded.notes
    by_kind: dict[str, list[Event]] = {kind: [] for kind in set(_KINDS.values())}
    flows: list[Event] = []
    for event in decoded.events:
        if event.ph == "X":
            kind = _KINDS.get(event.cat or "") or _KINDS.get((event.cat or "").lower())
            if kind is not None:
                by_kind[kind].append(event)
        elif event.ph in ("s", "f"):
            flows.append(event)
    base = _clean(by_kind, source, notes)
    if not by_kind["activities"]:
        if not by_kind["calls"]:
            raise _no_device(source, by_kind)
        notes.append(
            "The trace has runtime calls but no device activities: waits count, but their cost "
            "is unknown."
        )
    for events in by_kind.values():
        for event in events:
            event.ts -= base
            if event.args is None:
                event.args = _EMPTY
        events.sort(key=lambda event: (event.ts, -event.dur))
    _link_by_flows(by_kind, flows, base)
    return Trace(
        source=source,
        rank=_rank(decoded.meta),
        device=_device(decoded.meta, by_kind["activities"]),
        versions=_versions(decoded.meta),
        base=base,
        events=sum(map(len, by_kind.values())),
        notes=notes,
        **by_kind,
    )


def _no_device(source: str, by_kind: dict[str, list[Event]]) -> Unsupported:
    seen = sum(map(len, by_kind.values()))
    return Unsupported(
        f"{source} has {seen} host events but no device activities, which are needed to find waits. "
        "Profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] on a machine with a CUDA "
        "or ROCm device; traces of other devices are not supported."
    )


def _clean(by_kind: dict[str, list[Event]], source: str, notes: list[str]) -> float:
    """Leave out events with impossible times. Return the start time of the trace."""
    every = [event.ts for events in by_kind.values() for event in events if isfinite(event.ts)]
    if not every:
        raise UnreadableInput(
            f"{source} has no events that torch.profiler writes. A trace has cpu_op, cuda_runtime and "
            "kernel events under traceEvents; record it with torch.profiler."
        )
    middle = median_low(every)
    negative = lost = 0
    for kind, events in by_kind.items():
        kept = []
        for event in events:
            if not (abs(event.ts - middle) <= _FURTHEST_US and event.dur <= _FURTHEST_US):
                lost += 1
                continue
            if event.dur < 0:
                negative += 1
                event.dur = 0.0
            kept.append(event)
        by_kind[kind] = kept
    if lost:
        notes.append(f"{lost} events are more than a day from the others and were left out.")
    if negative:
        notes.append(f"{negative} events have a negative duration and were read as lasting 0 us.")
    return min((e.ts for events in by_kind.values() for e in events), default=0.0)


def _link_by_flows(by_kind: dict[str, list[Event]], flows: list[Event], base: float) -> None:
    """Join calls to activities by flow arrows, for traces without correlation numbers."""
    activities = by_kind["activities"]
    if any(event.args is not None and event.args.correlation is not None for event in activities):
        return
    number = {
        (event.ph, str(event.pid), str(event.tid), round(event.ts - base, 3)): event.id
        for event in flows
        if event.id is not None
    }
    for ph, events in (("s", by_kind["calls"]), ("f", activities)):
        for event in events:
            flow = number.get((ph, str(event.pid), str(event.tid), round(event.ts, 3)))
            if flow is not None:
                stream = event.args.stream if event.args else None
                event.args = Args(correlation=flow, stream=stream)


def _rank(meta: FileMeta) -> int | None:
    rank = meta.distributed.get("rank") if isinstance(meta.distributed, dict) else None
    return rank if isinstance(rank, int) and 0 <= rank < 2**31 else None


def _device(meta: FileMeta, activities: list[Event]) -> str:
    """Return the name of the device that ran most activities, or an empty string."""
    if not isinstance(meta.devices, list) or not meta.devices:
        return ""
    used = Counter(str(e.args.device) for e in activities if e.args).most_common(1) or [("", 0)]
    known = [one for one in meta.devices if isinstance(one, dict)]
    named = {str(one.get("id")): one.get("name") for one in known}
    name = named.get(used[0][0]) or next(iter(named.values()), "")
    return _text(name)


def _versions(meta: FileMeta) -> dict[str, str]:
    versions = {name: _text(value) for name, value in meta.versions.items()}
    system = meta.metadata.get("system") if isinstance(meta.metadata, dict) else None
    packages = system.get("pip_packages") if isinstance(system, dict) else None
    for line in packages if isinstance(packages, list) else ():
        match = _PACKAGE.fullmatch(line) if isinstance(line, str) else None
        if match and match[1].lower() in _PACKAGES:
            versions[match[1].lower()] = match[2]
    return versions


def _text(value: Any) -> str:
    return str(value)[:_MOST_TEXT] if isinstance(value, str | int | float) else ""


MOST_FILES = 64  # Arbitrary; ranks of eight nodes.
MOST_ENTRIES = 100_000  # Arbitrary; ends the search of a folder that holds something else.


def find_traces(paths: list[Path]) -> list[Path]:
    """Return the traces that the paths name, also in folders; at most 64.

    In a folder, prefer the files of `tensorboard_trace_handler` (`*.pt.trace.json[.gz]`) to other
    `*.json[.gz]`, among the first 100,000 entries. Raises `UsageError` if there are none, or too many.
    """
    found = [trace for path in paths for trace in (_inside(path) if path.is_dir() else [path])]
    unique = list(dict.fromkeys(found))
    if len(unique) > MOST_FILES:
        raise UsageError(
            f"there are {len(unique)} traces, and at most {MOST_FILES} are read at once. Name some."
        )
    return unique


def _inside(folder: Path) -> list[Path]:
    entries = islice(folder.rglob("*"), MOST_ENTRIES)
    files = sorted(path for path in entries if path.is_file())
    for endings in ((".pt.trace.json", ".pt.trace.json.gz"), (".json", ".json.gz")):
        if traces := [path for path in files if path.name.endswith(endings)]:
            return traces
    raise UsageError(
        f"{folder} holds no trace: no *.pt.trace.json, *.json or *.json.gz. "
        "torch.profiler.tensorboard_trace_handler(folder) writes them."
    )
