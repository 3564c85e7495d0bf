"""Reports of streams: `stream-check`, and `verify --stream`."""

from __future__ import annotations

import msgspec

from torchtrim.core.units import format_bytes, format_seconds
from torchtrim.records.profile import Profile
from torchtrim.records.report import Report, Result, Stream
from torchtrim.report.assemble import stream_report
from torchtrim.rules.registry import diagnose
from torchtrim.runner.script import Script, working_folder
from torchtrim.workflows.findings import subject_of
from torchtrim.workflows.stream.stream import (
    Progress,
    StreamRequest,
    both,
    compare_streams,
    run_stream,
)


def check_report(
    script: Script, request: StreamRequest, max_growth: int, progress: Progress
) -> Result:
    """What grows in a script that streams."""
    with working_folder() as folder:
        trial = run_stream(script, request, folder, progress)
    assert trial.profile is not None
    assert trial.stream is not None
    stream = msgspec.structs.replace(trial.stream, max_growth_bytes=max_growth)
    return Result(_report("stream-check", script, trial.profile, stream), trial.profile)


def compared_report(script: Script, request: StreamRequest, progress: Progress) -> Result:
    """Whether the bounds of a stream change what it computes, with what they save."""
    compared = compare_streams(script, request, progress)
    profile = compared.bounded.profile
    assert profile is not None
    report = _report("verify", script, profile, both(compared))
    return Result(msgspec.structs.replace(report, certificate=compared.certificate), profile)


def _report(verb: str, script: Script, profile: Profile, stream: Stream) -> Report:
    subject = subject_of(script, profile.device)
    return stream_report(verb, subject, stream, diagnose(profile), tuple(_notes(stream)))


def _notes(stream: Stream) -> list[str]:
    notes = [
        f"a frame is {stream.frame}; {stream.frames} frames, growth measured from frame {stream.first} on; "
        f"{format_seconds(stream.frame_seconds)} a frame while it is watched",
        f"the process grew by {_signed(stream.process_growth_bytes)} a frame, its allocators' noise included",
    ]
    if stream.max_growth_bytes is not None and stream.growth_bytes > stream.max_growth_bytes:
        grew, most = format_bytes(stream.growth_bytes), format_bytes(stream.max_growth_bytes)
        notes.insert(0, f"over the limit: {grew} a frame, --max-growth {most}")
    if stream.unbounded_growth_bytes is not None:
        seconds = format_seconds(stream.unbounded_frame_seconds or 0.0)
        notes.append(
            f"without bounds {format_bytes(stream.unbounded_growth_bytes)} a frame, and {seconds} a frame"
        )
    return notes


def _signed(amount: int) -> str:
    return ("+" if amount > 0 else "") + format_bytes(amount)
