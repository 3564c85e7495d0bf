"""Streams of scripts: their growth, and certificates that bounds do not change their results."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from msgspec.structs import replace

from torchtrim.core.units import format_apart, format_bytes, format_seconds
from torchtrim.errors import ApplyFailed, ScriptFailed
from torchtrim.records.certificate import Certificate, Difference, Verdict
from torchtrim.records.plan import Plan
from torchtrim.records.profile import Profile
from torchtrim.records.report import Report, Result, StreamReport
from torchtrim.records.trial import Crash
from torchtrim.report.assemble import stream_report
from torchtrim.rules.registry import diagnose
from torchtrim.runner.script import Script, failure, run_script, working_folder
from torchtrim.runner.stream_worker import KEPT, StreamTask, StreamTrial
from torchtrim.workflows.findings import subject_of

Progress = Callable[[str], None]


class StreamRequest(NamedTuple):
    """Number of frames, the definition of a frame, and a plan of the bounds."""

    frames: int
    frames_of: str | None = None
    plan: Plan | None = None


def _run_stream(
    script: Script,
    request: StreamRequest,
    folder: Path,
    progress: Progress,
    *,
    bounds: str = "script",
    compare: bool = False,
    keep: int = -1,
) -> StreamTrial:
    """Run a script for some frames. Raises `ScriptFailed` if it fails or has too few frames to measure
    growth; a run with bounds `on` may fail, with a crash in its trial."""
    script.check()
    task = StreamTask(
        target=script.command,
        project=str(script.project),
        frames=request.frames,
        frames_of=request.frames_of,
        bounds=bounds,
        plan=request.plan,
        compare=compare,
        keep=keep,
    )
    encoded = msgspec.json.encode(task)
    entry = "torchtrim.runner.stream_worker"
    ended = run_script(script, encoded, entry=entry, folder=folder, progress=progress)
    if ended.outcome is None:
        raise failure(ended, script.timeout)
    trial = msgspec.json.decode(ended.outcome, type=StreamTrial)
    crash = trial.crash
    if crash is not None:
        short = crash.kind == "no step"
        if crash.kind == "refused" or (bounds != "on" and not (short and keep >= 0)):
            raise _error(trial, crash, ended.output)
    return trial


def _error(trial: StreamTrial, crash: Crash, output: str) -> Exception:
    if crash.kind == "refused":
        return ApplyFailed(crash.message)
    learnt = f"{trial.frames} frames were complete."
    if crash.kind == "no step":
        return ScriptFailed(f"too few frames: {crash.message}", learnt=learnt)
    trace = crash.traceback or output
    return ScriptFailed(f"the script failed: {crash.message}", learnt=learnt, traceback=trace)


def _certificate(
    script: Script, request: StreamRequest, free: StreamTrial, tied: StreamTrial, tell: Progress
) -> Certificate:
    first = _first_difference(free, tied)
    difference: float | None = 0.0
    named, same = None, True
    if first is not None:
        difference, same = _looked_at(script, request, first, free, tell)
        module = free.what.removeprefix("a call of ")
        named = Difference(module=module, op=f"output in frame {first}")
    verdict, reason = _judged(free, tied, first, same)
    return Certificate(
        verdict=verdict,
        compared=(f"results of {len(free.digests)} frames ({free.what})",),
        largest_difference=difference,
        first_difference=named,
        noise=0.0 if first is not None and same else None,
        seeds="torchtrim",
        steps=len(free.digests),
        reason=reason,
    )


def _first_difference(free: StreamTrial, tied: StreamTrial) -> int | None:
    pairs = zip(free.digests, tied.digests, strict=False)
    end = len(tied.digests) if len(tied.digests) < len(free.digests) else None
    return next((frame for frame, (one, other) in enumerate(pairs) if one != other), end)


def _judged(
    free: StreamTrial, tied: StreamTrial, first: int | None, same: bool
) -> tuple[Verdict, str]:
    if first is None:
        if not tied.bounded:
            return "UNDECIDED", (
                "no state was bounded: the script uses no torchtrim.stream, and no adapter knows its models"
            )
        if len(set(free.digests)) <= len(free.digests) // 2:
            return "UNDECIDED", (
                "most frames give the same results, so any policy passes; check that the stream is tracked "
                "at all"
            )
        return "BITWISE", f"every bit agrees, with bounds on {', '.join(tied.bounded)}"
    if not same:
        return "UNDECIDED", "the unbounded stream does not equal itself; seed its generators"
    crash = tied.crash
    why = f"; there it failed: {crash.message}" if crash and first == len(tied.digests) else ""
    return "NOT EQUAL", f"results differ from frame {first} on, counted from 0{why}"


def _looked_at(
    script: Script, request: StreamRequest, frame: int, free: StreamTrial, tell: Progress
) -> tuple[float | None, bool]:
    """Return the relative difference of a frame's results, and True if the unbounded stream repeats its own
    results up to there."""
    few = request._replace(frames=frame + 1)
    with ExitStack() as stack:
        one, other = (stack.enter_context(working_folder()) for _ in range(2))
        again = _run_stream(script, few, one, tell, bounds="off", compare=True, keep=frame)
        _run_stream(script, few, other, tell, bounds="on", compare=True, keep=frame)
        return _largest(one, other), again.digests == free.digests[: frame + 1]


def _largest(one: Path, other: Path) -> float | None:
    names = sorted(path.name for path in one.glob(f"{KEPT}*"))
    if names != sorted(path.name for path in other.glob(f"{KEPT}*")):
        return None
    worst = 0.0
    for name in names:
        data, others = (bytearray((folder / name).read_bytes()) for folder in (one, other))
        if len(data) != len(others):
            return None
        if data:
            a, b = (torch.frombuffer(part, dtype=torch.float64) for part in (data, others))
            scale = float(a.abs().max()) or 1.0
            worst = max(worst, float((a - b).abs().max()) / scale)
    return worst


def check_report(
    script: Script, request: StreamRequest, max_growth: int, progress: Progress
) -> Result:
    """Measure the growth of a script that streams."""
    with working_folder() as folder:
        trial = _run_stream(script, request, folder, progress)
    assert trial.profile is not None
    assert trial.stream is not None
    stream = replace(trial.stream, max_growth_bytes=max_growth)
    return Result(_report("stream-check", script, trial.profile, stream), trial.profile)


def compared_report(script: Script, request: StreamRequest, progress: Progress) -> Result:
    """Compare a stream with and without its bounds: its results, and its growth."""
    with ExitStack() as stack:
        folders = [stack.enter_context(working_folder()) for _ in range(2)]
        free = _run_stream(script, request, folders[0], progress, bounds="off", compare=True)
        tied = _run_stream(script, request, folders[1], progress, bounds="on", compare=True)
    certificate = _certificate(script, request, free, tied, progress)
    assert tied.profile is not None
    assert tied.stream is not None
    assert free.stream is not None
    stream = replace(
        tied.stream,
        bounded=tied.bounded,
        unbounded_growth_bytes=free.stream.growth_bytes,
        unbounded_frame_seconds=free.stream.frame_seconds,
    )
    report = _report("verify", script, tied.profile, stream)
    return Result(replace(report, certificate=certificate), tied.profile)


def _report(verb: str, script: Script, profile: Profile, stream: StreamReport) -> Report:
    subject = subject_of(script, profile.device)
    return stream_report(verb, subject, stream, diagnose(profile), tuple(_notes(stream)))


def _notes(stream: StreamReport) -> list[str]:
    grew = stream.process_growth_bytes
    notes = [
        f"a frame is {stream.frame}; {stream.frames} frames, growth measured from frame {stream.first} on; "
        f"{format_seconds(stream.frame_seconds)} a frame while it is watched",
        f"the process grew by {'+' if grew > 0 else ''}{format_bytes(grew)} a frame, its allocators' noise "
        "included",
    ]
    if stream.max_growth_bytes is not None and stream.growth_bytes > stream.max_growth_bytes:
        over, most = format_apart(stream.growth_bytes, stream.max_growth_bytes)
        notes.insert(0, f"over the limit: {over} a frame, --max-growth {most}")
    if stream.unbounded_growth_bytes is not None:
        seconds = format_seconds(stream.unbounded_frame_seconds or 0.0)
        notes.append(
            f"without bounds {format_bytes(stream.unbounded_growth_bytes)} a frame, and {seconds} a frame"
        )
    return notes
