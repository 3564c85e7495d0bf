"""A profile as trace events for ui.perfetto.dev and chrome://tracing, with our counters and findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from torchtrim.analysis.timeline import kinds_over_time
from torchtrim.records import Finding, Profile
from torchtrim.records.operator_names import base_name
from torchtrim.records.plan import Technique
from torchtrim.records.report import Waiting
from torchtrim.report import facts
from torchtrim.report.copies import CopyLanes, copies_of
from torchtrim.report.lanes import Lanes, lanes
from torchtrim.report.safe import clean

_HOST, _DEVICE, _PLANNED = 1, 2, 3
_OPERATORS, _MODULES, _WAITS, _FINDINGS = 1, 2, 3, 4
_STREAM = 7
_US = 1e6
_COUNTED = 20_000


class _Event(msgspec.Struct, omit_defaults=True):
    name: str
    ph: str
    pid: int
    ts: float | None = None
    dur: float | None = None
    tid: int | None = None
    cat: str = ""
    s: str = ""
    args: dict[str, Any] | None = None


def render(
    profile: Profile,
    findings: Sequence[Finding],
    waiting: Waiting | None,
    *,
    techniques: Sequence[Technique] = (),
    source: bool = True,
) -> bytes:
    """The trace as JSON. Times are the recorded ones, or modelled where waits were priced for a GPU.

    Of a plan's techniques, the copies to and from the host are a process of their own, as planned.
    """
    drawn = lanes(waiting, profile)
    copies = copies_of(profile, techniques)
    events = [
        *_names(profile, drawn),
        *_operators(profile, drawn, source),
        *_modules(profile, drawn),
        *_waits(drawn),
        *_device(profile, drawn),
        *_memory(profile, drawn),
        *(_findings(profile, drawn, findings, source)),
        *(_copies(profile, copies) if copies is not None else ()),
    ]
    trace = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "torchtrim": clean(profile.torchtrim),
            "torch": clean(profile.torch),
            "device": clean(profile.device),
            "times": drawn.source,
        },
    }
    return msgspec.json.encode(trace) + b"\n"


def _names(profile: Profile, drawn: Lanes) -> Iterator[_Event]:
    about = f"{drawn.source}{f' for {drawn.device_name}' if drawn.device_name else ''}"
    processes = {_HOST: f"host, {about}", _DEVICE: f"device, {about}"}
    for pid, name in processes.items():
        if pid == _HOST or drawn.device:
            yield _Event(name="process_name", ph="M", pid=pid, args={"name": name})
            yield _Event(name="process_sort_index", ph="M", pid=pid, args={"sort_index": pid})
    tracks = {_OPERATORS: "operators", _MODULES: "modules", _WAITS: "waits", _FINDINGS: "findings"}
    for tid, name in tracks.items():
        yield _Event(name="thread_name", ph="M", pid=_HOST, tid=tid, args={"name": name})
    if drawn.device:
        args = {"name": "stream"}
        yield _Event(name="thread_name", ph="M", pid=_DEVICE, tid=_STREAM, args=args)


def _operators(profile: Profile, drawn: Lanes, source: bool) -> Iterator[_Event]:
    for span in drawn.host:
        op = profile.operators[span.index]
        args: dict[str, Any] = {"External id": span.index, "phase": op.phase}
        if module := profile.module_of(span.index):
            args["module"] = clean(module)
        if op.transient_bytes:
            args["bytes"] = op.transient_bytes
        if source and (place := profile.place_of(span.index)) is not None:
            args["place"] = clean(facts.place(place.path, place.line, facts.home(profile)))
        yield _Event(
            name=clean(base_name(op.name)),
            ph="X",
            pid=_HOST,
            tid=_OPERATORS,
            ts=_us(span.start),
            dur=_us(span.seconds),
            cat="cpu_op",
            args=args,
        )


def _modules(profile: Profile, drawn: Lanes) -> Iterator[_Event]:
    for lane in drawn.modules:
        for span in lane:
            module = profile.modules[span.index]
            yield _Event(
                name=clean(module.path),
                ph="X",
                pid=_HOST,
                tid=_MODULES,
                ts=_us(span.start),
                dur=_us(span.seconds),
                cat="module",
                args={"type": clean(module.type)},
            )


def _waits(drawn: Lanes) -> Iterator[_Event]:
    for span in drawn.waits:
        yield _Event(
            name=f"wait: {clean(span.name)}",
            ph="X",
            pid=_HOST,
            tid=_WAITS,
            ts=_us(span.start),
            dur=_us(span.seconds),
            cat="wait",
        )


def _device(profile: Profile, drawn: Lanes) -> Iterator[_Event]:
    for span in drawn.device:
        yield _Event(
            name=clean(base_name(profile.operators[span.index].name)),
            ph="X",
            pid=_DEVICE,
            tid=_STREAM,
            ts=_us(span.start),
            dur=_us(span.seconds),
            cat="kernel",
            args={"External id": span.index, "device": 0, "stream": _STREAM},
        )


def _copies(profile: Profile, copies: CopyLanes) -> Iterator[_Event]:
    """The planned step: compute, each direction of the link, and when compute pauses."""
    title = {"name": f"planned, modelled for {copies.device_name}"}
    yield _Event(name="process_name", ph="M", pid=_PLANNED, args=title)
    yield _Event(name="process_sort_index", ph="M", pid=_PLANNED, args={"sort_index": _PLANNED})
    tracks = {
        "compute": (copies.compute, "kernel"),
        "copies to the host": (copies.out, "gpu_memcpy"),
        "copies back": (copies.home, "gpu_memcpy"),
        "waits for copies": (copies.awaited, "wait"),
    }
    for tid, (track, (spans, category)) in enumerate(tracks.items(), 1):
        yield _Event(name="thread_name", ph="M", pid=_PLANNED, tid=tid, args={"name": track})
        for span in spans:
            known = profile.operators[span.index].name if span.index >= 0 else ""
            yield _Event(
                name=clean(base_name(known)) if known else "wait",
                ph="X",
                pid=_PLANNED,
                tid=tid,
                ts=_us(span.start),
                dur=_us(span.seconds),
                cat=category,
            )


def _memory(profile: Profile, drawn: Lanes) -> Iterator[_Event]:
    samples = kinds_over_time(profile, _COUNTED)
    kinds = samples[0].by_kind if samples else {}
    told = [kind for kind in kinds if any(sample.by_kind[kind] for sample in samples)]
    for sample in samples:
        yield _Event(
            name="memory, bytes by kind",
            ph="C",
            pid=_HOST,
            ts=_us(drawn.host[sample.operator].start),
            args={kind: sample.by_kind[kind] for kind in told},
        )


def _findings(
    profile: Profile, drawn: Lanes, findings: Sequence[Finding], source: bool
) -> Iterator[_Event]:
    """An instant at the first operator of each finding's line; those without one at the start."""
    first: dict[tuple[str, int], int] = {}
    for index in range(len(profile.operators)):
        place = profile.place_of(index)
        if place is not None:
            first.setdefault((place.path, place.line), index)
    for finding in findings:
        index = first.get((finding.path, finding.line), 0)
        args: dict[str, Any] = {"message": clean(finding.message)}
        if price := facts.price(finding):
            args["price"] = price
        if source and finding.path:
            args["place"] = clean(facts.place(finding.path, finding.line, facts.home(profile)))
        yield _Event(
            name=clean(finding.code),
            ph="i",
            s="p",
            pid=_HOST,
            tid=_FINDINGS,
            ts=_us(drawn.host[index].start) if drawn.host else 0.0,
            cat="finding",
            args=args,
        )


def _us(seconds: float) -> float:
    return round(seconds * _US, 3)
