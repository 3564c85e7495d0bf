"""Runs a workload once: a script in its own process, a live model in this one, state put back."""

from __future__ import annotations

import contextlib
import itertools
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
from torchtrim.dryrun.run import dry_run
from torchtrim.emulator.orders import Order
from torchtrim.errors import (
    ApplyFailed,
    NothingTrains,
    PlannedStepFailed,
    ScriptFailed,
    Unsupported,
    UsageError,
)
from torchtrim.executor.failing import note, place_of
from torchtrim.records.trial import Crash, Request, Trial
from torchtrim.runner.fake_process_group import seeming_ranks
from torchtrim.runner.ranks import first_failed, merged, on_rank, run_ranks
from torchtrim.runner.script import Ended, Script, failure, run_script
from torchtrim.runner.session import Session
from torchtrim.runner.settings import Wide
from torchtrim.runner.worker import ScriptTask

Model = TrainStep | Inference
Workload = Script | Model
Progress = Callable[[str], None]


def run_trial(
    workload: Workload, request: Request, folder: Path, progress: Progress = lambda _: None
) -> Trial:
    """Run it. Kept values are in the folder.

    Raises `ScriptFailed` with what was learnt, and `ApplyFailed` where a plan was refused.
    """
    if isinstance(workload, Script):
        return _run_script(workload, request, folder, progress)
    return _run_live(workload, request, folder, progress)


def _run_script(script: Script, request: Request, folder: Path, progress: Progress) -> Trial:
    script.check()
    if script.device == "cuda" and request.dry:
        raise UsageError(
            "an estimate needs no GPU, but the name of one: --device h100, or emulated for any."
        )
    if script.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: there is no CUDA device here. Leave it out, or say cpu.")
    _check_streams(script)
    if script.processes > 1:
        return _run_ranks(script, request, folder, progress)
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
        target=script.target if script.module else str(script.path),
        module=script.module,
        args=script.args,
        project=str(script.project),
        request=msgspec.structs.replace(
            request, device=script.device, streams="" if request.dry else script.streams
        ),
        world=script.processes,
    )


def _trial_of(script: Script, request: Request, ended: Ended) -> Trial:
    """The trial that a process left. Raises what a person reads where it failed."""
    if ended.outcome is None:
        died = failure(ended, script.timeout)
        ours = _is_planned(request, died) and not ended.timed_out
        raise _of_plan(died, "") if ours else died
    trial = msgspec.json.decode(ended.outcome, type=Trial)
    if trial.crash is not None:
        error = crash_error(trial, trial.crash, ended.output)
        raise _of_plan(error, trial.crash.place) if _is_planned(request, error) else error
    return trial


def _run_ranks(script: Script, request: Request, folder: Path, progress: Progress) -> Trial:
    """Run every rank. What fails on one names it, and tells of the others."""
    if request.dry:
        raise Unsupported(
            "an estimate is of one process. Leave --processes out, or watch the ranks: torchtrim diagnose."
        )
    task = msgspec.json.encode(_task(script, _of_ranks(request)))
    ranks = run_ranks(script, [task] * script.processes, folder=folder, progress=progress)
    culprit = first_failed(ranks)
    if culprit is not None:
        try:
            _trial_of(script._replace(timeout=culprit.seconds), request, culprit.ended)
        except Exception as error:
            on_rank(error, culprit, ranks, script.project)
            raise
    return merged([_trial_of(script, request, rank.ended) for rank in ranks], script.only)


def _of_ranks(request: Request) -> Request:
    """The request for each rank: all run the same number of steps, since they await each other.

    In its second step `DistributedDataParallel` arranges its buckets anew, so that one warms up too.
    """
    return msgspec.structs.replace(request, times=0, warmup=max(request.warmup, 2))


def _check_streams(script: Script) -> None:
    """Raises `UsageError` for an unknown order of streams, and where there are no streams to order."""
    if not script.streams:
        return
    Order.parse(script.streams)
    if script.device in ("cpu", "cuda"):
        raise UsageError(
            f"--streams {script.streams} is about the streams of an emulated device: leave --device "
            f"{script.device} out, or say --device emulated."
        )


def _run_live(
    workload: TrainStep | Inference, request: Request, folder: Path, progress: Progress
) -> Trial:
    dry = request.dry
    kept = () if request.sharding is not None else (workload.model,)
    snapshot = Snapshot(kept, workload.optimizers if kept else (), values=not dry)
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
    dtype = torch.float64 if request.double else None
    kept_dtypes = [(p, p.dtype) for p in workload.model.parameters()] if dtype else []
    try:
        if dtype is not None:
            _widen(workload.optimizers, dtype)
        session.watcher.optimizers.extend(workload.optimizers)
        wide = Wide() if dtype is not None else contextlib.nullcontext()
        with (
            session.watcher,
            _running_dry(dry) as notes,
            wide,
            seeming_ranks(request.ranks, sharded=request.sharding is not None),
            _finished_first(session),
        ):
            for number in range(request.total):
                workload.step(0 if dry else number, dtype)
                if not dry and number < request.total - 1:
                    workload.turn(number + 1)
                if not workload.trains or number == request.total - 1:
                    session.step_ends()
            _time_more(workload, session)
        trial = session.finish()
        trial.seeds = "script"
        trial.notes += tuple(notes)
        return trial
    except Exception as error:
        if not _is_planned(request, error):
            raise
        said = _not_the_same(error) if isinstance(error, CheckpointError) else _failed(error)
        raise PlannedStepFailed(said, place=place_of(error)) from error
    finally:
        session.finish()
        session.revert()
        for parameter, kind in kept_dtypes:
            parameter.data = parameter.data.to(kind)
        workload.turn(0)
        snapshot.restore()


@contextlib.contextmanager
def _finished_first(session: Session) -> Iterator[None]:
    """After an error the session takes its own patches back before those that it was begun under go."""
    try:
        yield
    except BaseException:
        session.finish()
        raise


def _time_more(workload: TrainStep | Inference, session: Session) -> None:
    """Run steps that are wanted for their times alone; one that raises is done without."""
    with contextlib.suppress(Exception):
        for number in itertools.count(session.trial.request.total):
            if not session.times_more:
                break
            session.watcher.step_closed()
            workload.step(number)
            session.step_ends()


@contextlib.contextmanager
def _running_dry(dry: bool) -> Iterator[list[str]]:
    """A dry run, if it is to be one; the list has its notes at the end."""
    notes: list[str] = []
    if not dry:
        yield notes
        return
    with dry_run(str(Path.cwd()), owned_only=True) as mode:
        yield notes
        notes += mode.guesses.notes()


def _is_planned(request: Request, error: Exception) -> bool:
    """Whether it failed with a plan applied; one that was refused as a whole is not tried again."""
    changes = request.plan is not None and bool(request.plan.techniques)
    refused = isinstance(error, ApplyFailed) and not place_of(error)
    return changes and not request.double and not refused


def _of_plan(error: Exception, place: str) -> PlannedStepFailed:
    learnt, trace = getattr(error, "learnt", ""), getattr(error, "traceback", "")
    return PlannedStepFailed(str(error), place=place, learnt=learnt, traceback=trace)


def _failed(error: Exception) -> str:
    said = f"{type(error).__name__}: {error}"
    return f"the step failed with the plan applied, and the model is as it was: {said}"


def _not_the_same(error: CheckpointError) -> str:
    """What a block that is not the same when it runs again tells the person."""
    return (
        "a block of the plan computes something else when it runs again in backward, so the planned step "
        "failed; the model is as it was. Such a block depends on what torchtrim cannot put back: a list "
        "or a cache that grows with every call, a global, a generator of its own. "
        f"Take it out of the plan, or make it depend on its inputs only. torch says: {error}"
    )


def _widen(optimizers: Iterable[torch.optim.Optimizer], dtype: torch.dtype) -> None:
    """Optimizer states in that type; the snapshot has the old ones."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    state[key] = value.to(dtype)


_WANTS_RANKS = (
    "environment variable RANK",
    "environment variable WORLD_SIZE",
    "'LOCAL_RANK'",
    "'RANK'",
)


def crash_error(trial: Trial, crash: Crash, output: str) -> Exception:
    """The error for a script that failed: what happened, and what was learnt until then."""
    if crash.kind == "refused":
        refused = ApplyFailed(crash.message)
        note(refused, crash.place)
        return refused
    learnt = _learnt(trial, crash)
    trace = crash.traceback or output
    if crash.kind == "no step":
        return _kind_of_no_step(trial)(_no_step(trial), learnt=learnt, traceback=output)
    if "EOFError" in crash.message:
        return ScriptFailed(
            "the script reads standard input, and torchtrim gives it none, since it runs the script "
            "several times. Pass what it asks for as arguments, after `--`.",
            learnt=learnt,
            traceback=trace,
        )
    if any(words in crash.message for words in _WANTS_RANKS):
        return ScriptFailed(
            f"the script is one of several processes: {crash.message}. Say how many: --processes 2, or "
            "run torchtrim under torchrun.",
            learnt=learnt,
            traceback=trace,
        )
    if crash.kind == "out of memory":
        return ScriptFailed(
            f"the script ran out of memory: {crash.message}", learnt=learnt, traceback=trace
        )
    return ScriptFailed(f"the script failed: {crash.message}", learnt=learnt, traceback=trace)


def _kind_of_no_step(trial: Trial) -> type[ScriptFailed]:
    trains = trial.backwards or trial.processes or trial.request.infers
    return NothingTrains if trial.fingerprint and not trains else ScriptFailed


def _no_step(trial: Trial) -> str:
    if trial.processes:
        return (
            f"the script started {trial.processes} process(es) of its own and trained nothing in the one "
            "that torchtrim runs, so there is no step to record. Give --processes with the number of ranks "
            "that it spawns, or have it train in a single process: most scripts have an option for that."
        )
    if trial.elsewhere and not trial.forwards:
        return (
            "the script called its modules in another thread than its main one, and torchtrim watches the "
            "main one alone, so there is no step to record. Call the function that trains directly, not "
            "through threading.Thread or a pool of threads."
        )
    if trial.request.infers:
        return (
            f"the script ended after {trial.forwards} calls of its models, and {trial.request.total} are "
            "wanted of the first one. Let it run for more, or give --steps 1 --warmup 0."
        )
    if not trial.forwards:
        return (
            "the script ended, and it never called a module with gradients on. torchtrim needs a loop "
            "that trains; check that the script was given the arguments with which it does. For one that "
            "only runs a model: torchtrim optimize SCRIPT --mode inference."
        )
    if not trial.optimizer_steps:
        return (
            f"the script ended after {trial.forwards} forwards and {trial.backwards} backwards, and no "
            "torch.optim.Optimizer ever stepped, nor did parameters change after a backward, so there is no "
            "step to record. Check that the script was given the arguments with which it trains."
        )
    return "the script ended before its first step was complete. Let it run for more steps."


def _learnt(trial: Trial, crash: Crash) -> str:
    """What was seen until the failure: the operator, and who was alive."""
    lines = [
        f"{len(trial.steps)} steps were complete; {trial.forwards} forwards, {trial.backwards} "
        f"backwards, {trial.optimizer_steps} optimizer steps."
    ]
    if crash.operator:
        place = f" at {crash.path}:{crash.line}" if crash.path else ""
        lines.append(f"It failed in {crash.operator}({crash.shapes}) in the {crash.phase}{place}.")
    profile = trial.profile
    if profile is not None and profile.operators:
        last = len(profile.operators) - 1
        found = holders(profile, last, 6)
        total = sum(holder.bytes for holder in found)
        lines.append(f"{format_bytes(total)} were alive then:")
        for holder in found:
            place = f" {holder.path}:{holder.line}" if holder.path else ""
            lines.append(
                f"  {format_bytes(holder.bytes):>9}  {holder.kind} {holder.module}{place} ({holder.why})"
            )
    return "\n".join(lines)
