"""Runs a command once for each rank, as torchrun does, with this process's own output."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from torchtrim.run.processes import LIFELINE, POSIX
from torchtrim.run.ranks import SURVIVORS_SECONDS, meeting_place, rank_environment

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 5.0
Rank = subprocess.Popen[bytes]


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run `python -m torchtrim ARGUMENTS` as so many ranks; the exit code of the first that fails, else 0.

    Where one fails the others have `SURVIVORS_SECONDS` left. When this returns or raises, all are gone with
    what they started; they go too when this process is killed.
    """
    store = meeting_place()
    ends = os.pipe() if POSIX else (-1, -1)
    ranks: list[Rank] = []
    try:
        for number in range(processes):
            told = rank_environment(number, processes, store.port) | {LIFELINE: str(ends[0])}
            ranks.append(_started(arguments, told, ends[0]))
        return _wait(ranks)
    finally:
        _end(ranks)
        for descriptor in ends if POSIX else ():
            os.close(descriptor)


def _started(arguments: Sequence[str], told: dict[str, str], lifeline: int) -> Rank:
    return subprocess.Popen(
        [sys.executable, "-m", "torchtrim", *arguments],
        env={**os.environ, **told},
        start_new_session=POSIX,
        pass_fds=(lifeline,) if POSIX else (),
    )


def _wait(ranks: Sequence[Rank]) -> int:
    deadline = float("inf")
    failed = 0
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        codes = [rank.poll() for rank in ranks]
        if not failed and (failed := next((code for code in codes if code), 0)):
            number = codes.index(failed)
            deadline = time.monotonic() + SURVIVORS_SECONDS
            print(
                f"torchtrim: rank {number} ended with {_said(failed)}", file=sys.stderr, flush=True
            )
    failed = failed or next((rank.returncode for rank in ranks if rank.returncode), 0)
    return 128 - failed if failed < 0 else failed


def _said(code: int) -> str:
    named = -code in list(signal.Signals)
    return signal.Signals(-code).name if named else f"exit code {code}"


def _end(ranks: Sequence[Rank]) -> None:
    """End those that run, in their own way if they do so in time, and then whatever they started."""
    running = [rank for rank in ranks if rank.poll() is None]
    for rank in running:
        rank.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    while any(rank.poll() is None for rank in running) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    for rank in ranks:
        if POSIX:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, signal.SIGKILL)
        elif rank.poll() is None:
            rank.kill()
        rank.wait()
