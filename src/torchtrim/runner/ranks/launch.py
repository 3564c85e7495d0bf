"""Runs a command once for each rank, as torchrun does, with this process's own output."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from torchtrim.runner.process.processes import LIFELINE, POSIX
from torchtrim.runner.ranks.ranks import State, await_all, meeting_place, rank_environment

_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.05


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
