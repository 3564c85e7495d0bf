"""Renders a profile as a trace for ui.perfetto.dev and chrome://tracing, with memory and findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from torchtrim.analysis.timeline import kinds_over_time
from torchtrim.records import Finding, Profile
from torchtrim.records.operator_names import base_name
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Place
from torchtrim.records.report import WaitCost
from torchtrim.report import facts
from torchtrim.report.lanes import CopyLanes, Lanes, LaneSpan, copies_of, lanes
from torchtrim.report.safe import clean

_HOST, _DEVICE, _PLANNED = 1, 2, 3
_OPERATORS, _MODULES, _WAITS, _FINDINGS = 1, 2, 3, 4
_STREAM = 7  # The stream that torch.profiler shows for the default stream.
_COUNTED = 20_000  # Arbitrary; more points of a counter slow the viewer down.


class PerfettoEvent(msgspec.Struct, omit_defaults=True):
    """An event of the trace; `ts` and `dur` are in microseconds."""

    name: str
    ph: str
    pid: int
    ts: float | None = None
    dur: float | None = None
    tid: int | None = None
    cat: str = ""
    s: str = ""
    args: Mapping[str, object] | None = None


def render(
    profile: Profile,
    findings: Sequence[Finding],
    waiting: WaitCost | None,
    *,
    techniques: Sequence[Technique] = (),
    source: bool = True,
) -> bytes:
    """Return the trace as JSON, with recorded times or, if waits were priced for a GPU, modelled ones.

    The planned copies of `techniques` to and from the host form a separate process.
    """
    drawn = lanes(waiting, profile)
    copies = copies_of(profile, techniques)
    events = [
        *_names(profile, drawn),
        *_operators(profile, drawn, source),
        *_other_spans(profile, drawn),
        *_memory(profile, drawn),
        *_findings(profile, drawn, findings, source),
        *(_copies(profile, copies) if copies is not None else ()),
    ]
    about = {name: clean(getattr(profile, name)) for name in ("torchtrim", "torch", "device")}
    return encoded(events, otherData={**about, "times": drawn.source})


def encoded(events: Sequence[PerfettoEvent], **more: object) -> bytes:
    """Return the trace as JSON."""
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", **more}) + b"\n"


def metadata(what: str, pid: int, tid: int | None = None, **args: object) -> PerfettoEvent:
    """Return the event that names a process or thread, or sets its position."""
    return PerfettoEvent(name=what, ph="M", pid=pid, tid=tid, args=args)


def place_name(profile: Profile, place: Place) -> str:
    """Return the place as the trace shows it."""
    return clean(facts.place(place.path, place.line, facts.home(profile)))


def _names(profile: Profile, drawn: Lanes) -> Iterator[PerfettoEvent]:
    about = f"{drawn.source}{f' for {drawn.device_name}' if drawn.device_name else ''}"
    processes = {_HOST: f"host, {about}", _DEVICE: f"device, {about}"}
    for pid, name in processes.items():
        if pid == _HOST or drawn.device:
            yield metadata("process_name", pid, name=name)
            yield metadata("process_sort_index", pid, sort_index=pid)
    tracks = {_OPERATORS: "operators", _MODULES: "modules", _WAITS: "waits", _FINDINGS: "findings"}
    for tid, name in tracks.items():
        yield metadata("thread_name", _HOST, tid, name=name)
    if drawn.device:
        yield metadata("thread_name", _DEVICE, _STREAM, name="stream")


def _operators(profile: Profile, drawn: Lanes, source: bool) -> Iterator[PerfettoEvent]:
    for span in drawn.host:
        op = profile.operators[span.index]
        args: dict[str, object] = {"External id": span.index, "phase": op.phase}
        if module := profile.module_of(span.index):
            args["module"] = clean(module)
        if op.transient_bytes:
            args["bytes"] = op.transient_bytes
        if source and (place := profile.place_of(span.index)) is not None:
            args["place"] = place_name(profile, place)
        yield _complete(span, base_name(op.name), _HOST, _OPERATORS, "cpu_op", args)


def _other_spans(profile: Profile, drawn: Lanes) -> Iterator[PerfettoEvent]:
    for span in (span for lane in drawn.modules for span in lane):
        module = profile.modules[span.index]
        args: Mapping[str, object] = {"type": clean(module.type)}
        yield _complete(span, module.path, _HOST, _MODULES, "module", args)
    for span in drawn.waits:
        yield _complete(span, f"wait: {span.name}", _HOST, _WAITS, "wait")
    for span in drawn.device:
        name = base_name(profile.operators[span.index].name)
        args = {"External id": span.index, "device": 0, "stream": _STREAM}
        yield _complete(span, name, _DEVICE, _STREAM, "kernel", args)


def _copies(profile: Profile, copies: CopyLanes) -> Iterator[PerfettoEvent]:
    """Yield the planned step: compute, each direction of the link, and the pauses of compute."""
    yield metadata("process_name", _PLANNED, name=f"planned, modelled for {copies.device_name}")
    yield metadata("process_sort_index", _PLANNED, sort_index=_PLANNED)
    tracks = {
        "compute": (copies.compute, "kernel"),
        "copies to the host": (copies.out, "gpu_memcpy"),
        "copies back": (copies.home, "gpu_memcpy"),
        "waits for copies": (copies.awaited, "wait"),
    }
    for tid, (track, (spans, category)) in enumerate(tracks.items(), 1):
        yield metadata("thread_name", _PLANNED, tid, name=track)
        for span in spans:
            known = profile.operators[span.index].name if span.index >= 0 else ""
            yield _complete(span, base_name(known) or "wait", _PLANNED, tid, category)


def _memory(profile: Profile, drawn: Lanes) -> Iterator[PerfettoEvent]:
    samples = kinds_over_time(profile, _COUNTED)
    kinds = samples[0].by_kind if samples else {}
    shown = [kind for kind in kinds if any(sample.by_kind[kind] for sample in samples)]
    for sample in samples:
        yield PerfettoEvent(
            name="memory, bytes by kind",
            ph="C",
            pid=_HOST,
            ts=microseconds(drawn.host[sample.operator].start),
            args={kind: sample.by_kind[kind] for kind in shown},
        )


def _findings(
    profile: Profile, drawn: Lanes, findings: Sequence[Finding], source: bool
) -> Iterator[PerfettoEvent]:
    """Yield an instant at the first operator of each finding's line, or at the start if it has none."""
    first: dict[tuple[str, int], int] = {}
    for index in range(len(profile.operators)):
        place = profile.place_of(index)
        if place is not None:
            first.setdefault((place.path, place.line), index)
    for finding in findings:
        index = first.get((finding.path, finding.line), 0)
        args: dict[str, object] = {"message": clean(finding.message)}
        if price := facts.price(finding):
            args["price"] = price
        if source and finding.path:
            args["place"] = clean(facts.place(finding.path, finding.line, facts.home(profile)))
        yield PerfettoEvent(
            name=clean(finding.code),
            ph="i",
            s="p",
            pid=_HOST,
            tid=_FINDINGS,
            ts=microseconds(drawn.host[index].start) if drawn.host else 0.0,
            cat="finding",
            args=args,
        )


def _complete(
    span: LaneSpan,
    name: str,
    pid: int,
    tid: int,
    cat: str,
    args: Mapping[str, object] | None = None,
) -> PerfettoEvent:
    return complete(name, pid, tid, span.start, span.seconds, args, cat)


def complete(
    name: str,
    pid: int,
    tid: int,
    start: float,
    seconds: float,
    args: Mapping[str, object] | None,
    cat: str = "",
) -> PerfettoEvent:
    """Return the event of `seconds` from `start`."""
    ts, dur = microseconds(start), microseconds(seconds)
    return PerfettoEvent(
        name=clean(name), ph="X", pid=pid, tid=tid, ts=ts, dur=dur, cat=cat, args=args
    )


def microseconds(seconds: float) -> float:
    """Return microseconds, rounded to nanoseconds."""
    return round(seconds * 1e6, 3)
