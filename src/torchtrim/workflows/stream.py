"""Streams of scripts: what grows in one, and whether its bounds change what it computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from torchtrim.core.units import format_bytes, format_seconds
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
    """How many frames, what a frame is, and a plan of the bounds."""

    frames: int
    frames_of: str | None = None
    plan: Plan | None = None


class StreamPair(NamedTuple):
    """A stream with its bounds beside the same one without."""

    bounded: StreamTrial
    unbounded: StreamTrial
    certificate: Certificate


def run_stream(
    script: Script,
    request: StreamRequest,
    folder: Path,
    progress: Progress,
    *,
    bounds: str = "script",
    compare: bool = False,
    keep: int = -1,
) -> StreamTrial:
    """Run a script for some frames. Raises `ScriptFailed` where it failed or had fewer than growth needs; a
    run with its bounds `on` may fail, and says so in its trial."""
    script.check()
    task = StreamTask(
        target=script.target if script.module else str(script.path),
        module=script.module,
        args=script.args,
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
    if trial.crash is not None and _is_fatal(trial.crash, bounds, keep):
        raise _error(trial, ended.output)
    return trial


def _is_fatal(crash: Crash, bounds: str, keep: int) -> bool:
    if crash.kind == "no step":
        return keep < 0 and bounds != "on"
    return bounds != "on" or crash.kind == "refused"


def compare_streams(script: Script, request: StreamRequest, progress: Progress) -> StreamPair:
    """Run a stream without its bounds and with them, and compare what each frame gives."""
    with ExitStack() as stack:
        folders = [stack.enter_context(working_folder()) for _ in range(2)]
        free = run_stream(script, request, folders[0], progress, bounds="off", compare=True)
        tied = run_stream(script, request, folders[1], progress, bounds="on", compare=True)
    certificate = _certificate(script, request, free, tied, progress)
    return StreamPair(tied, free, certificate)


def both(compared: StreamPair) -> StreamReport:
    """The figures of the bounded stream, with those of the unbounded one."""
    tied, free = compared.bounded.stream, compared.unbounded.stream
    assert tied is not None
    assert free is not None
    return msgspec.structs.replace(
        tied,
        bounded=compared.bounded.bounded,
        unbounded_growth_bytes=free.growth_bytes,
        unbounded_frame_seconds=free.frame_seconds,
    )


def _error(trial: StreamTrial, output: str) -> Exception:
    crash = trial.crash
    assert crash is not None
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
    same = True
    if first is not None:
        difference, same = _looked_at(script, request, first, free, tell)
    verdict, reason = _judged(free, tied, first, same)
    return Certificate(
        verdict=verdict,
        compared=(f"results of {len(free.digests)} frames ({free.what})",),
        largest_difference=difference,
        first_difference=_named(free, first),
        noise=0.0 if first is not None and same else None,
        seeds="torchtrim",
        steps=len(free.digests),
        reason=reason,
    )


def _named(free: StreamTrial, first: int | None) -> Difference | None:
    if first is None:
        return None
    return Difference(module=free.what.removeprefix("a call of "), op=f"output in frame {first}")


def _first_difference(free: StreamTrial, tied: StreamTrial) -> int | None:
    pairs = zip(free.digests, tied.digests, strict=False)
    first = next((frame for frame, (one, other) in enumerate(pairs) if one != other), None)
    if first is None and len(tied.digests) < len(free.digests):
        return len(tied.digests)
    return first


def _judged(
    free: StreamTrial, tied: StreamTrial, first: int | None, same: bool
) -> tuple[Verdict, str]:
    if first is None:
        if not tied.bounded:
            return "UNDECIDED", (
                "nothing was bounded: the script uses no torchtrim.stream, and no adapter knows its models"
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
    """How much that frame's results differ, relative to the largest; and whether the unbounded stream gave
    the same again until then."""
    few = request._replace(frames=frame + 1)
    with ExitStack() as stack:
        one, other = (stack.enter_context(working_folder()) for _ in range(2))
        again = run_stream(script, few, one, tell, bounds="off", compare=True, keep=frame)
        run_stream(script, few, other, tell, bounds="on", compare=True, keep=frame)
        return _largest(one, other), again.digests == free.digests[: frame + 1]


def _largest(one: Path, other: Path) -> float | None:
    names = sorted(path.name for path in one.glob(f"{KEPT}*"))
    if names != sorted(path.name for path in other.glob(f"{KEPT}*")):
        return None
    worst = 0.0
    for name in names:
        a, b = (_values(folder / name) for folder in (one, other))
        if a.shape != b.shape:
            return None
        if a.numel():
            scale = float(a.abs().max()) or 1.0
            worst = max(worst, float((a - b).abs().max()) / scale)
    return worst


def _values(path: Path) -> torch.Tensor:
    data = bytearray(path.read_bytes())
    return (
        torch.frombuffer(data, dtype=torch.float64)
        if data
        else torch.empty(0, dtype=torch.float64, device="cpu")
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


def _report(verb: str, script: Script, profile: Profile, stream: StreamReport) -> Report:
    subject = subject_of(script, profile.device)
    return stream_report(verb, subject, stream, diagnose(profile), tuple(_notes(stream)))


def _notes(stream: StreamReport) -> list[str]:
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
