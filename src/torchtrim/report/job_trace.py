"""Renders the steps of several ranks as one trace for ui.perfetto.dev: a process per rank, on one clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from torchtrim.records.operator_names import base_name
from torchtrim.records.profile import Profile
from torchtrim.report import facts
from torchtrim.report.safe import clean
from torchtrim.step.job import Job, job_of

_OPERATORS, _LOADER, _COMMUNICATION = 1, 2, 3
_TRACKS = {_OPERATORS: "operators", _LOADER: "data loader", _COMMUNICATION: "communication"}


def render(profiles: Sequence[Profile], *, source: bool = True) -> bytes:
    """Return the trace as JSON, with the recorded times."""
    job = job_of(profiles)
    events = [
        *(event for profile in job.profiles for event in _names(profile)),
        *_operators(job, source),
        *_loaders(job),
        *_communication(job),
    ]
    trace = {"traceEvents": events, "displayTimeUnit": "ms"}
    return msgspec.json.encode(trace) + b"\n"


def _names(profile: Profile) -> Iterator[dict[str, Any]]:
    yield _meta(profile.rank, "process_name", 0, f"rank {profile.rank}")
    for track, name in _TRACKS.items():
        yield _meta(profile.rank, "thread_name", track, name)


def _meta(rank: int, what: str, track: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}


def _operators(job: Job, source: bool) -> Iterator[dict[str, Any]]:
    for profile, begin in zip(job.profiles, job.begins, strict=True):
        home = facts.home(profile)
        for index, op in enumerate(profile.operators):
            args: dict[str, Any] = {"phase": op.phase}
            if source and (place := profile.place_of(index)) is not None:
                args["place"] = clean(facts.place(place.path, place.line, home))
            name = clean(base_name(op.name))
            yield _span(profile.rank, _OPERATORS, name, begin + op.start, op.seconds, args)


def _loaders(job: Job) -> Iterator[dict[str, Any]]:
    for profile, begin in zip(job.profiles, job.begins, strict=True):
        for wait in profile.waits:
            args = {"workers": wait.workers}
            start = begin + wait.start
            yield _span(profile.rank, _LOADER, "wait for data", start, wait.seconds, args)


def _communication(job: Job) -> Iterator[dict[str, Any]]:
    for exchange in job.exchanges:
        for part in exchange.parts:
            args = {
                "bytes": exchange.bytes,
                "group": clean(exchange.group),
                "blocked_us": _us(part.blocked),
                "waited_for_others_us": _us(exchange.waited(part)),
            }
            seconds = part.end - part.start
            name = clean(exchange.name)
            yield _span(part.rank, _COMMUNICATION, name, part.start, seconds, args)


def _span(
    rank: int, track: int, name: str, start: float, seconds: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "pid": rank,
        "tid": track,
        "ts": _us(start),
        "dur": _us(seconds),
        "args": args,
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
