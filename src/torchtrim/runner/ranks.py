"""The ranks of a job on this machine: their start, their supervision, and the end of all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch

from torchtrim.errors import ScriptFailed, Unsupported
from torchtrim.records.trial import Crash, Trial
from torchtrim.runner.processes import LIFELINE, POSIX, Process, dumped_stacks, kill_group
from torchtrim.runner.script import (
    OUTCOME,
    STATUS,
    TASK,
    Ended,
    Script,
    ended_of,
    environment_of,
    text_of,
)
from torchtrim.runner.warm import start

# Time for the ranks that lose a peer to fail with errors of their own.
_SURVIVORS_SECONDS = 15.0
# The ranks' own imports and files take tens of seconds at most; beyond, a rank waits for a dead peer.
_PATIENCE_SECONDS = 60.0
_HOST = "127.0.0.1"
_POLL_SECONDS = 0.05  # short beside a run's seconds, and no load
_STACK_LINES = 6  # innermost frames of torch between an exchange and the caller
State = Literal["runs", "done", "failed"]


class RankEnded(NamedTuple):
    """The end of a rank. `failed_ns`: time of its failure, None if it did not fail or torchtrim stopped it.

    `stopped`: torchtrim stopped it after `seconds`. `stack`: its main thread's stack then, innermost frame
    first.
    """

    number: int
    ended: Ended
    failed_ns: int | None
    stopped: bool
    seconds: float
    stack: tuple[str, ...]


class _Crashed(msgspec.Struct):
    crash: Crash | None = None


def crash_in(outcome: bytes | None) -> Crash | None:
    """Return the crash in an outcome of any worker, if it has one."""
    return None if outcome is None else msgspec.json.decode(outcome, type=_Crashed).crash


class _RunningRank:
    def __init__(self, number: int, folder: Path, process: Process) -> None:
        self.number = number
        self.folder = folder
        self.process = process
        self.state: State = "runs"
        self.failed_ns: int | None = None
        self.stack: tuple[str, ...] = ()

    def look(self) -> None:
        """Update `state`: a rank fails by a crash in its outcome, or by ending without an outcome."""
        if self.state != "runs":
            return
        ended = self.process.ended()  # first, since the outcome comes before the end
        outcome = self.folder / OUTCOME
        if outcome.exists():
            crash = crash_in(outcome.read_bytes())
            self.state = "done" if crash is None else "failed"
            self.failed_ns = outcome.stat().st_mtime_ns if crash is not None else None
        elif ended:
            self.state, self.failed_ns = "failed", time.time_ns()


def folder_of(folder: Path, number: int, only: int = -1) -> Path:
    """Return the folder of a rank's files: `folder` itself for the only requested rank."""
    return folder if number == only else folder / f"rank-{number}"


def run_ranks(
    script: Script,
    tasks: Sequence[bytes],
    *,
    folder: Path,
    progress: Callable[[str], None],
    entry: str = "torchtrim.runner.worker",
    hide_gpu: bool = False,
) -> list[RankEnded]:
    """Run a task for each rank. The ranks and their children are dead when this returns or raises.

    `entry`: the module that runs a task; `hide_gpu`: hide GPUs from it.
    """
    store = _new_store()
    ranks: list[_RunningRank] = []
    began = time.monotonic()
    said = ""

    def tell() -> None:
        nonlocal said
        running = next((rank for rank in ranks if rank.state == "runs"), None)
        status = text_of(running.folder / STATUS) if running else ""
        if status and status != said:
            said = status
            progress(f"{status}, {len(ranks)} ranks")

    try:
        for number, task in enumerate(tasks):
            own = folder_of(folder, number, script.only)
            own.mkdir(exist_ok=True)
            (own / TASK).write_bytes(task)
            (own / OUTCOME).unlink(missing_ok=True)  # of a run that failed
            environment = environment_of(script, hide_gpu)
            environment |= _rank_environment(number, len(tasks), store.port)
            process = start(entry, own, own / "output", environment, script.path)
            ranks.append(_RunningRank(number, own, process))
        timed_out = _await_all(ranks, script.timeout, tell)
        seconds = min(time.monotonic() - began, script.timeout)
        running = [rank for rank in ranks if rank.state == "runs"]
        stacks = dumped_stacks([(rank.process.pid, rank.folder) for rank in running])
        for rank, stack in zip(running, stacks, strict=True):
            rank.stack = stack
    finally:
        for rank in ranks:
            rank.process.end()
    return [
        RankEnded(
            rank.number,
            ended_of(rank.folder, rank.process, timed_out and rank.state == "runs"),
            rank.failed_ns,
            rank.state == "runs",
            seconds,
            rank.stack,
        )
        for rank in ranks
    ]


def _new_store() -> Any:
    """Return the ranks' store on a free port, which this process holds from now on."""
    distributed: Any = torch.distributed
    if not distributed.is_available():
        raise Unsupported(
            "this build of torch lacks torch.distributed, so torchtrim cannot start ranks."
        )
    return distributed.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)


def _rank_environment(number: int, world: int, port: int) -> dict[str, str]:
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(number)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(world)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "TORCHTRIM_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "torchtrim",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def _await_all(
    ranks: Sequence[_RunningRank | _RankProcess],
    timeout: float,
    tell: Callable[[], None],
    *,
    patient: bool = False,
) -> bool:
    """Wait for every rank, until its time is over; return True if one ran too long, and none failed.

    Once a rank has failed, the others have `_SURVIVORS_SECONDS`. Once the first is done, they have as long
    again plus `_PATIENCE_SECONDS`, or unlimited time if `patient`.
    """
    began = time.monotonic()
    deadline = began + timeout
    states: tuple[State, ...] = ()
    while time.monotonic() < deadline:
        for rank in ranks:
            rank.look()
        now = tuple(rank.state for rank in ranks)
        if "runs" not in now:
            return False
        if now != states:
            states, seconds = now, time.monotonic() - began
            if "failed" in states:
                deadline = min(deadline, began + seconds + _SURVIVORS_SECONDS)
            elif "done" in states and not patient:
                deadline = min(deadline, began + 2 * seconds + _PATIENCE_SECONDS)
        tell()
        time.sleep(_POLL_SECONDS)
    return "failed" not in states


_LOST = (
    *("connection", "gloo", "nccl", "distbackenderror", "diststoreerror", "distnetworkerror"),
    *("broken pipe", "socket", "timed out", "timeout", "store"),
)
"""Words of errors that a rank raises after the loss of a peer."""
_TORCH = ("/torch/", "torch\\")
_EXCHANGES = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/autograd/")


def merged(trials: Sequence[Trial], only: int = -1) -> Trial:
    """Return the trial of the rank with the highest peak, with all ranks' trials, or the trial of `only`."""
    if only >= 0:
        return trials[only]
    largest = max(trials, key=lambda trial: trial.peak_bytes)
    return msgspec.structs.replace(largest, ranks=tuple(trials))


def first_failed(ranks: Sequence[RankEnded]) -> RankEnded | None:
    """Return the rank that most likely caused the failure; None if no rank failed.

    Ranks that died come first, then ranks that raised, finally ranks whose error is the loss of a peer.
    """
    failed = [rank for rank in ranks if rank.failed_ns is not None]
    if failed:
        return min(failed, key=_order)
    stopped = [rank for rank in ranks if rank.stopped]
    return min(stopped, key=lambda rank: (_exchanges(rank), rank.number), default=None)


def _order(rank: RankEnded) -> tuple[int, int]:
    assert rank.failed_ns is not None
    crash = crash_in(rank.ended.outcome)
    if crash is None:
        return 0, rank.failed_ns
    return 1 + any(word in crash.message.lower() for word in _LOST), rank.failed_ns


def on_rank(
    error: Exception, culprit: RankEnded, ranks: Sequence[RankEnded], project: Path
) -> None:
    """Add the rank to an error, and the fate of the other ranks."""
    error.args = (f"rank {culprit.number} of {len(ranks)}: {error}",)
    if isinstance(error, ScriptFailed):
        others = [_account(rank, project) for rank in ranks if rank is not culprit]
        where = _where(culprit, project)
        own = [f"rank {culprit.number} was at {where}"] if where else []
        error.learnt = "\n".join([*own, *others, *filter(None, [error.learnt])])


def _account(rank: RankEnded, project: Path) -> str:
    crash = crash_in(rank.ended.outcome)
    who = f"rank {rank.number}"
    if crash is not None:
        first = crash.message.partition("\n")[0]
        return f"{who} then failed: {first[:200]}"
    if rank.failed_ns is not None:
        return f"{who} died with exit status {rank.ended.returncode} at {rank.ended.status or 'its start'}"
    if not rank.stopped:
        return f"{who} completed all its steps"
    where = _where(rank, project)
    waits = ", waiting for others" if _exchanges(rank) else ""
    at = f" and {where}{waits}" if where else ""
    limit = "" if rank.ended.timed_out else f" within {_SURVIVORS_SECONDS:.0f} s of the failure"
    return f"{who} was stopped{limit} at {rank.ended.status or 'its start'}{at}"


def _where(rank: RankEnded, project: Path) -> str:
    own = (line for line in rank.stack if line.startswith(str(project)))
    others = (line for line in rank.stack if not any(part in line for part in _TORCH))
    return next(own, next(others, ""))


def _exchanges(rank: RankEnded) -> bool:
    return any(part in line for line in rank.stack[:_STACK_LINES] for part in _EXCHANGES)


_GRACE_SECONDS = 5.0  # arbitrary, enough to flush files and leave a process group


class _RankProcess:
    """Rank `python -m torchtrim ARGUMENTS`, which ends when the lifeline in `more` is closed."""

    def __init__(self, number: int, arguments: Sequence[str], more: dict[str, str]) -> None:
        self.number = number
        self.state: State = "runs"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torchtrim", *arguments],
            env={**os.environ, **more},
            start_new_session=POSIX,
            pass_fds=(int(more[LIFELINE]),) if POSIX else (),
        )

    def look(self) -> None:
        if self.state == "runs" and (code := self.process.poll()) is not None:
            self.state = "failed" if code else "done"


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run `python -m torchtrim ARGUMENTS` on each rank; return the exit code of the first to fail, else 0.

    The ranks and their children are dead when this returns or raises, and die with this process.
    """
    store = _new_store()
    ends = os.pipe() if POSIX else (-1, -1)
    ranks: list[_RankProcess] = []
    code = 0

    def note() -> None:
        nonlocal code
        failed = next((rank for rank in ranks if rank.state == "failed"), None)
        if not code and failed is not None:
            code = failed.process.returncode
            named = -code in list(signal.Signals)
            said = signal.Signals(-code).name if named else f"exit code {code}"
            text = f"torchtrim: rank {failed.number} ended with {said}"
            print(text, file=sys.stderr, flush=True)

    try:
        for number in range(processes):
            more = _rank_environment(number, processes, store.port) | {LIFELINE: str(ends[0])}
            ranks.append(_RankProcess(number, arguments, more))
        _await_all(ranks, float("inf"), note, patient=True)
        note()
    finally:
        _end([rank.process for rank in ranks])
        for descriptor in ends if POSIX else ():
            os.close(descriptor)
    return 128 - code if code < 0 else code


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    while any(process.poll() is None for process in running) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    for process in processes:
        kill_group(process)
