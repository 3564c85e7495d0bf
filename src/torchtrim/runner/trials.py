"""One run of a workload: of a script in its own process, of a live model in this one, then restored."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import torch
from torch.utils.checkpoint import CheckpointError

from torchtrim.analysis.peak import holders
from torchtrim.capture.build import Setting
from torchtrim.capture.snapshot import Snapshot
from torchtrim.capture.workload import Inference, TrainStep
from torchtrim.core.units import format_bytes
from torchtrim.dryrun.mode import Dry
from torchtrim.dryrun.run import dry_run
from torchtrim.emulator.orders import StreamOrder
from torchtrim.errors import (
    ApplyFailed,
    NothingTrains,
    PlannedStepFailed,
    ScriptFailed,
    Unsupported,
    UsageError,
)
from torchtrim.executor.failing import note, place_of
from torchtrim.records.commands import command
from torchtrim.records.trial import Crash, Request, Trial
from torchtrim.runner.fake_process_group import fake_ranks
from torchtrim.runner.ranks import first_failed, merged, on_rank, run_ranks
from torchtrim.runner.script import Ended, Script, failure, run_script, working_folder
from torchtrim.runner.session import Session
from torchtrim.runner.settings import precision
from torchtrim.runner.worker import ScriptTask
from torchtrim.runner.written import Leftovers
from torchtrim.stream.growth import host_bytes

Model = TrainStep | Inference
Workload = Script | Model
Progress = Callable[[str], None]
_LEFTOVERS = Leftovers()


def run_trial(
    workload: Workload, request: Request, folder: Path, progress: Progress = lambda _: None
) -> Trial:
    """Run the workload, and put the values that the request keeps into the folder.

    Raises `ScriptFailed` with the facts known until the failure, and `ApplyFailed` for a refused plan.
    """
    if isinstance(workload, Script):
        return _run_script(workload, request, folder, progress)
    return _run_live(workload, request, folder, progress)


def run_once(workload: Workload, request: Request, what: str, progress: Progress) -> Trial:
    """Run a workload in a temporary folder, with `what` before each text of its progress."""
    with working_folder() as folder:
        return run_trial(workload, request, folder, lambda text: progress(f"{what}: {text}"))


def _run_script(script: Script, request: Request, folder: Path, progress: Progress) -> Trial:
    script.check()
    if script.device == "cuda" and request.dry:
        raise UsageError(
            "an estimate runs without a GPU: name one, such as --device h100, or give --device "
            "emulated for any."
        )
    if script.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: found no CUDA device. Leave it out, or give cpu.")
    if script.streams:
        StreamOrder.parse(script.streams)  # raises for an unknown order
        if script.device in ("cpu", "cuda"):
            raise UsageError(
                f"--streams {script.streams} orders the streams of an emulated device: leave --device "
                f"{script.device} out, or give --device emulated."
            )
    found_any = _LEFTOVERS.of(script.command)
    try:
        return _run_settled(script, request, folder, progress)
    except ScriptFailed as error:
        if not found_any or isinstance(error, PlannedStepFailed):
            raise
        # It may have found what an earlier run left, such as a folder.
        _LEFTOVERS.put_back(script.command)
        return _run_settled(script, request, folder, progress)


def _run_settled(script: Script, request: Request, folder: Path, progress: Progress) -> Trial:
    try:
        run = _run_ranks if script.processes > 1 else _run_alone_or_emulated
        return run(script, request, folder, progress)
    finally:
        _LEFTOVERS.settle(script.command, folder)


def _run_alone_or_emulated(
    script: Script, request: Request, folder: Path, progress: Progress
) -> Trial:
    try:
        return _run_alone(script, request, folder, progress)
    except ScriptFailed as error:
        if script.device is not None or _BY_NUMBER not in str(error):
            raise
    # Numbers are read in C++, where no patch starts an emulation: it runs from the start.
    return _run_alone(script._replace(device="emulated"), request, folder, progress)


def _run_alone(script: Script, request: Request, folder: Path, progress: Progress) -> Trial:
    ended = run_script(
        script,
        msgspec.json.encode(_task(script, request)),
        entry="torchtrim.runner.worker",
        folder=folder,
        progress=progress,
        hide_gpu=request.dry,
    )
    return _trial_of(script, request, ended)


def _task(script: Script, request: Request) -> ScriptTask:
    return ScriptTask(
        target=script.command,
        project=str(script.project),
        request=msgspec.structs.replace(
            request, device=script.device, streams="" if request.dry else script.streams
        ),
        world=script.processes,
    )


def _trial_of(script: Script, request: Request, ended: Ended) -> Trial:
    if ended.outcome is None:
        died = failure(ended, script.timeout)
        ours = _is_planned(request, died) and not ended.timed_out
        raise _of_plan(died, "") if ours else died
    trial = msgspec.json.decode(ended.outcome, type=Trial)
    if trial.crash is not None:
        error = crash_error(trial, trial.crash, ended.output)
        if not _is_planned(request, error):
            raise error
        if trial.forwards or trial.crash.kind == "refused":
            raise _of_plan(error, trial.crash.place)
        raise ScriptFailed(
            f"{_BEFORE_THE_PLAN} {error}",
            learnt=getattr(error, "learnt", ""),
            traceback=getattr(error, "traceback", ""),
        )
    return trial


def _run_ranks(script: Script, request: Request, folder: Path, progress: Progress) -> Trial:
    """Run all ranks; an error names the rank that failed, and the fate of the others."""
    if request.dry:
        raise Unsupported(
            "an estimate does not support --processes. Leave it out, or watch the ranks: torchtrim diagnose."
        )
    # All run the same number of steps, since they await each other, and two warm up, since in its second
    # step `DistributedDataParallel` rebuilds its buckets.
    same = msgspec.structs.replace(request, times=0, warmup=max(request.warmup, 2))
    task = msgspec.json.encode(_task(script, same))
    ranks = run_ranks(script, [task] * script.processes, folder=folder, progress=progress)
    culprit = first_failed(ranks)
    if culprit is not None:
        try:
            _trial_of(script._replace(timeout=culprit.seconds), request, culprit.ended)
        except Exception as error:
            on_rank(error, culprit, ranks, script.project)
            raise
    return merged([_trial_of(script, request, rank.ended) for rank in ranks], script.only)


def _run_live(workload: Model, request: Request, folder: Path, progress: Progress) -> Trial:
    dry = request.dry
    # Sharding changes a model for good, so that model was made for the estimate.
    models = () if request.sharding is not None else (workload.model,)
    optimizers = workload.optimizers if models else ()
    snapshot = Snapshot(models, optimizers, values=not dry, folder=folder, room=_room())
    setting = Setting(request.device or "", "", str(Path.cwd()))
    if request.total > 1 and not dry:
        workload.prepare()
    workload.turn(0)
    session = Session(
        request,
        setting,
        folder=folder,
        progress=progress,
        trains=workload.trains,
        ours=lambda: [*snapshot.kept(), *workload.spare()],
    )
    running: contextlib.AbstractContextManager[Dry | None] = contextlib.nullcontext()
    if dry:
        running = dry_run(str(Path.cwd()), owned_only=True)
    dtype = torch.float64 if request.double else None
    dtypes = [(p, p.dtype) for p in workload.model.parameters()] if dtype else []
    try:
        if dtype is not None:
            _upcast_states(workload.optimizers, dtype)
        session.watcher.optimizers.extend(workload.optimizers)
        with (
            session.watcher,
            running as mode,
            precision(double=request.double, nudged=request.nudged),
            fake_ranks(request.ranks, sharded=request.sharding is not None),
            _finished_first(session),
        ):
            _run_steps(workload, session, dtype)
            _time_more(workload, session)
        trial = session.finish()
        trial.seeds = "script"
        trial.notes += tuple(mode.guesses.notes()) if mode is not None else ()
        return trial
    except Exception as error:
        if not _is_planned(request, error):
            raise
        said = f"{type(error).__name__}: {error}"
        message = f"the step failed with the plan applied, and the model is unchanged: {said}"
        if isinstance(error, CheckpointError):
            message = f"{_NOT_THE_SAME} torch says: {error}"
        raise PlannedStepFailed(message, place=place_of(error)) from error
    finally:
        session.finish()
        session.revert()
        for parameter, before in dtypes:
            parameter.data = parameter.data.to(before)
        workload.turn(0)
        snapshot.restore()
        snapshot.forget()


def _room() -> float:
    """Return the bytes that copies of a live model may take of the host: half of the free memory."""
    with contextlib.suppress(Unsupported):
        used, total = host_bytes()
        return (total - used) / 2
    return math.inf


def _run_steps(workload: Model, session: Session, dtype: torch.dtype | None) -> None:
    """Run the steps of the session's request, whose number grows if an estimate goes on."""
    number, dry = 0, session.trial.request.dry
    while number < (total := session.trial.request.total):
        workload.step(0 if dry else number, dtype)
        number += 1
        if not dry and number < total:
            workload.turn(number)
        if not workload.trains or number == total:
            session.step_ends()
            session.watcher.step_closed()


@contextlib.contextmanager
def _finished_first(session: Session) -> Iterator[None]:
    try:
        yield
    except BaseException:
        session.finish()
        raise


def _time_more(workload: Model, session: Session) -> None:
    with contextlib.suppress(Exception):
        for number in itertools.count(session.trial.request.total):
            if not session.times_more:
                break
            session.watcher.step_closed()
            workload.step(number)
            session.step_ends()


def _is_planned(request: Request, error: Exception) -> bool:
    changes = request.plan is not None and bool(request.plan.techniques)
    refused = isinstance(error, ApplyFailed) and not place_of(error)
    return changes and not request.double and not refused


def _of_plan(error: Exception, place: str) -> PlannedStepFailed:
    learnt, trace = getattr(error, "learnt", ""), getattr(error, "traceback", "")
    return PlannedStepFailed(str(error), place=place, learnt=learnt, traceback=trace)


_NOT_THE_SAME = (
    "a block of the plan computes something else when it runs again in backward, so the planned step "
    "failed; the model is unchanged. Such a block depends on state that torchtrim cannot restore: a list "
    "or a cache that grows with every call, a global, its own generator. "
    "Take it out of the plan, or make it depend on its inputs only."
)


def _upcast_states(optimizers: Iterable[torch.optim.Optimizer], dtype: torch.dtype) -> None:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    state[key] = value.to(torch.complex128 if value.is_complex() else dtype)


_BEFORE_THE_PLAN = (
    "in a later run the script failed before its model ran, so before the plan changed anything, and not in "
    "its first run: it may have found what that left, such as a folder."
)
_BY_NUMBER = "Cannot access accelerator device when none is available"
"""What torch says to `torch.device(0)` and `.to(0)`."""
_WANTS_RANKS = ("environment variable RANK", "variable WORLD_SIZE", "'LOCAL_RANK'", "'RANK'")


def crash_error(trial: Trial, crash: Crash, output: str) -> Exception:
    """Return the error for a script that failed, with the facts known until the failure."""
    if crash.kind == "refused":
        refused = ApplyFailed(crash.message)
        note(refused, crash.place)
        return refused
    learnt = _learnt(trial, crash)
    trace = crash.traceback or output
    trains = trial.backwards or trial.processes or trial.request.infers
    only_runs = trial.request.dry and trial.fingerprint and not (trains or trial.forwards)
    if crash.kind == "crashed" and only_runs:
        return NothingTrains(f"the script failed: {crash.message}", learnt=learnt, traceback=trace)
    if crash.kind == "no step":
        kind = NothingTrains if trial.fingerprint and not trains else ScriptFailed
        return kind(_no_step(trial), learnt=learnt, traceback=output)
    message = f"the script failed: {crash.message}"
    if "EOFError" in crash.message:
        message = (
            "the script reads standard input, which torchtrim closes, since it runs the script several "
            "times. If it asks about what an earlier run left, such as a folder of logs, have it write to "
            "a new one, or overwrite without a question. Else pass the input as arguments, after `--`."
        )
    elif any(words in crash.message for words in _WANTS_RANKS):
        message = (
            f"the script is one of several processes: {crash.message}. Give their number: --processes 2, "
            "or run torchtrim under torchrun."
        )
    elif crash.kind == "out of memory":
        message = f"the script ran out of memory: {crash.message}"
    return ScriptFailed(message, learnt=learnt, traceback=trace)


def _no_step(trial: Trial) -> str:
    if trial.processes:
        return (
            f"the script started {trial.processes} process(es) of its own and trained nothing in the one "
            "that torchtrim runs, so torchtrim recorded no step. Give --processes with the number of ranks "
            "that it spawns, or have it train in a single process: most scripts have an option for that."
        )
    if trial.elsewhere and not trial.forwards:
        return (
            "the script called its modules in other threads, in evaluation mode and without `backward`, so "
            "torchtrim recorded no step. Check that its arguments make it train."
        )
    if trial.elsewhere:
        return (
            "the script called modules in several threads, and the thread that first called one in training "
            f"mode, with gradients, has completed no step: {trial.forwards} forwards, {trial.backwards} "
            "backwards. torchtrim watches that thread alone. Let the thread that trains be the first, "
            "or call the model under torch.no_grad() in the others."
        )
    if trial.request.infers:
        return (
            f"the script ended after {trial.forwards} calls of its models, and torchtrim needs "
            f"{trial.request.total} of the first one. Let it run longer, or give --steps 1 --warmup 0."
        )
    if not trial.forwards:
        return (
            "the script ended without calling a module with gradients on. torchtrim needs a loop that "
            "trains; check that its arguments make it train. For a script that only runs a model: "
            f"{command('optimize', '--mode', 'inference')}"
        )
    if not trial.optimizer_steps:
        return (
            f"the script ended after {trial.forwards} forwards and {trial.backwards} backwards, and no "
            "torch.optim.Optimizer ever stepped, nor did parameters change after a backward, so torchtrim "
            "recorded no step. Check that its arguments make it train."
        )
    return "the script ended before its first step was complete. Let it run for more steps."


def _learnt(trial: Trial, crash: Crash) -> str:
    lines = [
        f"{len(trial.steps)} steps were completed; {trial.forwards} forwards, {trial.backwards} "
        f"backwards, {trial.optimizer_steps} optimizer steps."
    ]
    if crash.operator:
        place = f" at {crash.path}:{crash.line}" if crash.path else ""
        lines.append(f"It failed in {crash.operator}({crash.shapes}) in the {crash.phase}{place}.")
    profile = trial.profile
    if profile is not None and profile.operators:
        last = len(profile.operators) - 1
        largest = holders(profile, last, 6)
        total = sum(holder.bytes for holder in largest)
        lines.append(f"{format_bytes(total)} were live then:")
        for holder in largest:
            place = f" {holder.path}:{holder.line}" if holder.path else ""
            lines.append(
                f"  {format_bytes(holder.bytes):>9}  {holder.kind} {holder.module}{place} ({holder.why})"
            )
    return "\n".join(lines)
