"""A trace file -> `Trace`: events sorted into host and device, in order, on one clock that starts at 0."""

from __future__ import annotations

import re
from collections import Counter
from math import isfinite
from pathlib import Path
from statistics import median_low
from typing import Any

from torchtrim.errors import UnreadableInput, Unsupported
from torchtrim.records.trace_events import Args, Event, Trace
from torchtrim.traces.decode import MOST_BYTES, Decoded, FileMeta, decode, read_bytes

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

    Raises `UnreadableInput` for a damaged or hostile file or no trace, `Unsupported` for a trace in which
    no device did anything.
    """
    decoded = decode(read_bytes(path, most), str(path))
    return _trace(decoded, str(path))


def _trace(decoded: Decoded, source: str) -> Trace:
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
            raise Unsupported(_no_device(source, by_kind))
        notes.append(
            "The trace has calls of the runtime and nothing that ran on a device: what waits is counted, and "
            "what it costs cannot be told."
        )
    for events in by_kind.values():
        for event in events:
            event.ts -= base
            if event.args is None:
                event.args = _EMPTY
        events.sort(key=_order)
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


def _order(event: Event) -> tuple[float, float]:
    return (event.ts, -event.dur)


def _no_device(source: str, by_kind: dict[str, list[Event]]) -> str:
    seen = sum(map(len, by_kind.values()))
    return (
        f"{source} has {seen} events of the host and none of a device, so nothing can be told of waits. "
        "Profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] on a machine with a CUDA "
        "or ROCm device; traces of others are not read."
    )


def _clean(by_kind: dict[str, list[Event]], source: str, notes: list[str]) -> float:
    """Leave out events whose times cannot be; returns the time at which the trace begins."""
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
        notes.append(f"{lost} events lie more than a day from the others and were left out.")
    if negative:
        notes.append(f"{negative} events have a negative duration and were read as lasting 0 us.")
    return min((e.ts for events in by_kind.values() for e in events), default=0.0)


def _link_by_flows(by_kind: dict[str, list[Event]], flows: list[Event], base: float) -> None:
    """Traces without correlation numbers say by arrows which call launched what."""
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
            found = number.get((ph, str(event.pid), str(event.tid), round(event.ts, 3)))
            if found is not None:
                stream = event.args.stream if event.args else None
                event.args = Args(correlation=found, stream=stream)


def _rank(meta: FileMeta) -> int | None:
    rank = meta.distributed.get("rank") if isinstance(meta.distributed, dict) else None
    return rank if isinstance(rank, int) and 0 <= rank < 2**31 else None


def _device(meta: FileMeta, activities: list[Event]) -> str:
    """The name of the device that most activities ran on; empty where the trace does not tell."""
    if not isinstance(meta.devices, list) or not meta.devices:
        return ""
    used = Counter(str(e.args.device) for e in activities if e.args).most_common(1) or [("", 0)]
    known = [one for one in meta.devices if isinstance(one, dict)]
    named = {str(one.get("id")): one.get("name") for one in known}
    name = named.get(used[0][0]) or next(iter(named.values()), "")
    return _text(name)


def _versions(meta: FileMeta) -> dict[str, str]:
    found = {name: _text(value) for name, value in meta.versions.items()}
    system = meta.metadata.get("system") if isinstance(meta.metadata, dict) else None
    packages = system.get("pip_packages") if isinstance(system, dict) else None
    for line in packages if isinstance(packages, list) else ():
        match = _PACKAGE.fullmatch(line) if isinstance(line, str) else None
        if match and match[1].lower() in _PACKAGES:
            found[match[1].lower()] = match[2]
    return found


def _text(value: Any) -> str:
    return str(value)[:_MOST_TEXT] if isinstance(value, str | int | float) else ""
