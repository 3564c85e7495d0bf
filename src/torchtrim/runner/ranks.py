"""Starts the ranks of a job on this machine, and sees to it that all of them end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import torch

from torchtrim.errors import ScriptFailed, Unsupported
from torchtrim.records.trial import Crash, Trial
from torchtrim.runner.processes import LIFELINE, POSIX, STACK, Process, asked_where
from torchtrim.runner.script import (
    OUTCOME,
    STATUS,
    TASK,
    Ended,
    Script,
    environment_of,
    text_of,
    what_ended,
)
from torchtrim.runner.warm import start

SURVIVORS_SECONDS = 15.0
"""How long the other ranks may go on once one has failed."""
PATIENCE_SECONDS = 60.0
"""How much longer than the first rank that is done the others may take, besides as long again."""
_HOST = "127.0.0.1"
_POLL_SECONDS = 0.05
_WORKER = "torchtrim.runner.worker"
State = Literal["runs", "done", "failed"]


class RankEnded(NamedTuple):
    """How a rank ended. `failed_ns`: when it failed, None where it did not or was stopped by us.

    `stopped`: it still ran when it was, after so many `seconds`. `stack`: where its main thread was then,
    innermost line first.
    """

    number: int
    ended: Ended
    failed_ns: int | None
    stopped: bool
    seconds: float
    stack: tuple[str, ...]


class WatchedRank(Protocol):
    """A rank that is watched; `look` sees what has become of it."""

    state: State

    def look(self) -> None:
        """Bring `state` up to date."""
        ...


class _Glance(msgspec.Struct):
    """What of an outcome tells how a rank ended."""

    crash: Crash | None = None


def crash_in(outcome: bytes | None) -> Crash | None:
    """The crash that a rank left in its outcome, None where it left none."""
    return None if outcome is None else msgspec.json.decode(outcome, type=_Glance).crash


class _RunningRank:
    """One rank that runs."""

    def __init__(self, number: int, folder: Path, process: Process) -> None:
        self.number = number
        self.folder = folder
        self.process = process
        self.state: State = "runs"
        self.failed_ns: int | None = None
        self.stack: tuple[str, ...] = ()

    def look(self) -> None:
        """See whether it is done or has failed: it has where it left a crash, or ended and left nothing."""
        if self.state != "runs":
            return
        gone = self.process.ended()
        outcome = self.folder / OUTCOME
        if outcome.exists():
            crash = crash_in(outcome.read_bytes())
            self.state = "done" if crash is None else "failed"
            self.failed_ns = outcome.stat().st_mtime_ns if crash is not None else None
        elif gone:
            self.state, self.failed_ns = "failed", time.time_ns()

    def status(self) -> str:
        """What it said last."""
        return text_of(self.folder / STATUS)


def folder_of(folder: Path, number: int, only: int = -1) -> Path:
    """Where a rank's files are; those of the rank that alone is wanted lie in the folder itself."""
    return folder if number == only else folder / f"rank-{number}"


def run_ranks(
    script: Script,
    tasks: Sequence[bytes],
    *,
    folder: Path,
    progress: Callable[[str], None],
    entry: str = _WORKER,
    hide_gpu: bool = False,
) -> list[RankEnded]:
    """Run a task for each rank. All are gone, with what they started, when this returns or raises.

    Where one fails, the others have `SURVIVORS_SECONDS` left. `entry` is what runs a task and leaves its
    outcome; `hide_gpu`: it sees none.
    """
    store = meeting_place()
    ranks: list[_RunningRank] = []
    began = time.monotonic()
    try:
        for number, task in enumerate(tasks):
            own = folder_of(folder, number, script.only)
            own.mkdir(exist_ok=True)
            (own / TASK).write_bytes(task)
            environment = environment_of(script, hide_gpu)
            environment |= rank_environment(number, len(tasks), store.port)
            process = start(entry, own, own / "output", environment, script.path)
            ranks.append(_RunningRank(number, own, process))
        timed_out = await_all(ranks, script.timeout, _Tells(ranks, progress).tell)
        seconds = min(time.monotonic() - began, script.timeout)
        running = [rank for rank in ranks if rank.state == "runs"]
        for rank, stack in zip(running, asked_where([_of(r) for r in running]), strict=True):
            rank.stack = stack
    finally:
        for rank in ranks:
            rank.process.end()
    return [
        RankEnded(
            rank.number,
            what_ended(rank.folder, rank.process, timed_out and rank.state == "runs"),
            rank.failed_ns,
            rank.state == "runs",
            seconds,
            rank.stack,
        )
        for rank in ranks
    ]


def _of(rank: _RunningRank) -> tuple[int, Path]:
    return rank.process.pid, rank.folder / STACK


def meeting_place() -> Any:
    """Where the ranks meet: at a free port, which is ours from the beginning."""
    distributed: Any = torch.distributed
    if not distributed.is_available():
        raise Unsupported("this build of torch has no torch.distributed, so there are no ranks.")
    return distributed.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)


def rank_environment(number: int, world: int, port: int) -> dict[str, str]:
    """What a rank finds in its environment, as torchrun would set it."""
    return {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "ROLE_RANK": str(number),
        "ROLE_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "TORCHTRIM_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "torchtrim",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def await_all(
    ranks: Sequence[WatchedRank],
    timeout: float,
    tell: Callable[[], None] = lambda: None,
    *,
    patient: bool = False,
) -> bool:
    """Wait until every rank is done, or may not go on. True if one ran too long, and none failed.

    `patient`: when the first is done, the others may take as long as they want.
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
            states, deadline = now, min(deadline, _limit(now, began, patient))
        tell()
        time.sleep(_POLL_SECONDS)
    return "failed" not in states


def _limit(states: tuple[State, ...], began: float, patient: bool) -> float:
    """Until when those that run may go on."""
    now = time.monotonic()
    if "failed" in states:
        return now + SURVIVORS_SECONDS
    if patient or "done" not in states:
        return float("inf")
    return now + (now - began) + PATIENCE_SECONDS


class _Tells:
    """Says what the first of the ranks that run is at, if that is news."""

    def __init__(self, ranks: Sequence[_RunningRank], progress: Callable[[str], None]) -> None:
        self._ranks = ranks
        self._progress = progress
        self._said = ""

    def tell(self) -> None:
        """Look, and say it."""
        status = next((rank.status() for rank in self._ranks if rank.state == "runs"), "")
        if status and status != self._said:
            self._said = status
            self._progress(f"{status}, {len(self._ranks)} ranks")


_LOST = (
    *("connection", "gloo", "nccl", "distbackenderror", "diststoreerror", "distnetworkerror"),
    *("broken pipe", "socket", "timed out", "timeout", "store"),
)
"""Words of the errors that a rank meets when another one is gone."""
_TORCH = ("/torch/", "torch\\")
_EXCHANGES = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/autograd/")


def merged(trials: Sequence[Trial], only: int = -1) -> Trial:
    """The trial of the rank with the highest peak, with those of all; or that of `only`."""
    if only >= 0:
        return trials[only]
    largest = max(trials, key=lambda trial: trial.peak_bytes)
    return msgspec.structs.replace(largest, ranks=tuple(trials))


def first_failed(ranks: Sequence[RankEnded]) -> RankEnded | None:
    """The rank that failed for a reason of its own, as far as can be told; None if none failed.

    One that died by itself comes before those that raised, and what only tells of a lost peer comes last.
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
    return 1 + _tells_of_lost_peer(crash), rank.failed_ns


def _tells_of_lost_peer(crash: Crash) -> bool:
    return any(word in crash.message.lower() for word in _LOST)


def on_rank(
    error: Exception, culprit: RankEnded, ranks: Sequence[RankEnded], project: Path
) -> None:
    """Have the error of one rank name it, and say what became of the others."""
    error.args = (f"rank {culprit.number} of {len(ranks)}: {error}",)
    if isinstance(error, ScriptFailed):
        others = [account(rank, project) for rank in ranks if rank is not culprit]
        where = _where(culprit, project)
        own = [f"rank {culprit.number} was at {where}"] if where else []
        error.learnt = "\n".join([*own, *others, *filter(None, [error.learnt])])


def account(rank: RankEnded, project: Path) -> str:
    """What became of a rank, in a line."""
    crash = crash_in(rank.ended.outcome)
    who = f"rank {rank.number}"
    if crash is not None:
        first = crash.message.partition("\n")[0]
        return f"{who} then failed: {first[:200]}"
    if rank.failed_ns is not None:
        return f"{who} died with exit status {rank.ended.returncode} at {rank.ended.status or 'its start'}"
    if not rank.stopped:
        return f"{who} did all its steps"
    where = _where(rank, project)
    waits = ", where it waited for others" if _exchanges(rank) else ""
    at = f" and {where}{waits}" if where else ""
    limit = "" if rank.ended.timed_out else f" within {SURVIVORS_SECONDS:.0f} s of the failure"
    return f"{who} was stopped{limit} at {rank.ended.status or 'its start'}{at}"


def _where(rank: RankEnded, project: Path) -> str:
    """The user's own line among those where the rank is."""
    own = (line for line in rank.stack if line.startswith(str(project)))
    others = (line for line in rank.stack if not any(part in line for part in _TORCH))
    return next(own, next(others, ""))


def _exchanges(rank: RankEnded) -> bool:
    """Whether the rank is inside an exchange with others."""
    return any(part in line for line in rank.stack[:6] for part in _EXCHANGES)


_GRACE_SECONDS = 5.0


class _RankProcess:
    """`python -m torchtrim ARGUMENTS` as one rank. It ends when the pipe does."""

    def __init__(self, number: int, arguments: Sequence[str], told: dict[str, str]) -> None:
        self.number = number
        self.state: State = "runs"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torchtrim", *arguments],
            env={**os.environ, **told},
            start_new_session=POSIX,
            pass_fds=(int(told[LIFELINE]),) if POSIX else (),
        )

    def look(self) -> None:
        """See whether it has ended, and how."""
        if self.state == "runs" and (code := self.process.poll()) is not None:
            self.state = "failed" if code else "done"


class _Job:
    """Ranks that run. `code` is the first one's that failed, 0 where none has."""

    def __init__(self) -> None:
        self.ranks: list[_RankProcess] = []
        self.code = 0

    def note(self) -> None:
        """Say it when the first has failed."""
        failed = next((rank for rank in self.ranks if rank.state == "failed"), None)
        if self.code or failed is None:
            return
        self.code = failed.process.returncode
        said = f"torchtrim: rank {failed.number} ended with {_said(self.code)}"
        print(said, file=sys.stderr, flush=True)

    def end(self) -> None:
        """End those that run, in their own way if they do so in time, and then whatever they started."""
        running = [rank.process for rank in self.ranks if rank.process.poll() is None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + _GRACE_SECONDS
        while any(one.poll() is None for one in running) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        for rank in self.ranks:
            if POSIX:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.process.pid, signal.SIGKILL)
            elif rank.process.poll() is None:
                rank.process.kill()
            rank.process.wait()


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run `python -m torchtrim ARGUMENTS` as so many ranks; the exit code of the first that fails, else 0.

    Where one fails the others have `SURVIVORS_SECONDS` left. When this returns or raises, all are gone with
    what they started; they go too when this process is killed.
    """
    store = meeting_place()
    ends = os.pipe() if POSIX else (-1, -1)
    job = _Job()
    try:
        for number in range(processes):
            told = rank_environment(number, processes, store.port) | {LIFELINE: str(ends[0])}
            job.ranks.append(_RankProcess(number, arguments, told))
        await_all(job.ranks, float("inf"), job.note, patient=True)
        job.note()
    finally:
        job.end()
        for descriptor in ends if POSIX else ():
            os.close(descriptor)
    return 128 - job.code if job.code < 0 else job.code


def _said(code: int) -> str:
    named = -code in list(signal.Signals)
    return signal.Signals(-code).name if named else f"exit code {code}"
