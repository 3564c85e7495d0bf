"""Renders the steps of several ranks as one trace for ui.perfetto.dev: a process per rank, on one clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchtrim.records.operator_names import base_name
from torchtrim.records.profile import Profile
from torchtrim.report.perfetto import (
    PerfettoEvent,
    complete,
    encoded,
    metadata,
    microseconds,
    place_name,
)
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
    return encoded(events)


def _names(profile: Profile) -> Iterator[PerfettoEvent]:
    yield metadata("process_name", profile.rank, 0, name=f"rank {profile.rank}")
    for track, name in _TRACKS.items():
        yield metadata("thread_name", profile.rank, track, name=name)


def _operators(job: Job, source: bool) -> Iterator[PerfettoEvent]:
    for profile, begin in zip(job.profiles, job.begins, strict=True):
        for index, op in enumerate(profile.operators):
            args: dict[str, object] = {"phase": op.phase}
            if source and (place := profile.place_of(index)) is not None:
                args["place"] = place_name(profile, place)
            start, name = begin + op.start, base_name(op.name)
            yield complete(name, profile.rank, _OPERATORS, start, op.seconds, args)


def _loaders(job: Job) -> Iterator[PerfettoEvent]:
    for profile, begin in zip(job.profiles, job.begins, strict=True):
        for wait in profile.waits:
            args: dict[str, object] = {"workers": wait.workers}
            start = begin + wait.start
            yield complete("wait for data", profile.rank, _LOADER, start, wait.seconds, args)


def _communication(job: Job) -> Iterator[PerfettoEvent]:
    for exchange in job.exchanges:
        for part in exchange.parts:
            args: dict[str, object] = {
                "bytes": exchange.bytes,
                "group": clean(exchange.group),
                "blocked_us": microseconds(part.blocked),
                "waited_for_others_us": microseconds(exchange.waited(part)),
            }
            seconds = part.end - part.start
            yield complete(exchange.name, part.rank, _COMMUNICATION, part.start, seconds, args)
