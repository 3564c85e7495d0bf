"""Runs an unmodified script in a process of its own, and sees to it that nothing of it stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from torchtrim.dispatch.places import project_of
from torchtrim.errors import ScriptFailed, UsageError
from torchtrim.runner.processes import Process
from torchtrim.runner.warm import environment_of_runs, start

TASK, OUTCOME, STATUS = "task.json", "outcome.json", "status"
_GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.05
_TAIL_BYTES = 4000


class Script(NamedTuple):
    """A script or, with `module`, a module to run as one. `timeout` in seconds is for one run.

    `streams`: the order of an emulated device's streams: `early`, `late`, `random` or `random:SEED`.
    `processes`: how many ranks of it run; `only`: the one of them whose trial is wanted, -1 for all.
    """

    target: str
    args: tuple[str, ...] = ()
    module: bool = False
    device: str | None = None
    timeout: float = 600.0
    streams: str = ""
    processes: int = 1
    only: int = -1

    @property
    def path(self) -> Path | None:
        """The file, None for a module."""
        return None if self.module else Path(self.target).resolve()

    @property
    def project(self) -> Path:
        """The folder whose source is the user's own."""
        return project_of(self.path or Path.cwd() / "module")

    def check(self) -> None:
        """Raises `UsageError` if there is nothing to run."""
        if self.path is not None and not self.path.is_file():
            raise UsageError(
                f"there is no script {self.target}. Give the path of a Python file, or -m and the "
                "name of a module."
            )


class Ended(NamedTuple):
    """How a run ended. `outcome` is what the process left, None if nothing."""

    outcome: bytes | None
    returncode: int
    output: str
    status: str
    timed_out: bool


def run_script(
    script: Script,
    task: bytes,
    *,
    entry: str,
    folder: Path,
    progress: Callable[[str], None],
    hide_gpu: bool = False,
) -> Ended:
    """Run `python -m entry FOLDER`, which finds its task there and leaves its outcome there.

    It may be a fork of a process that has imported torch. It and all that it started are gone when this
    returns or raises. `hide_gpu`: it sees none.
    """
    (folder / TASK).write_bytes(task)
    output = folder / "output"
    process = start(entry, folder, output, environment_of(script, hide_gpu), script.path)
    try:
        timed_out = _wait(process, script.timeout, folder, progress)
    finally:
        process.end()
    return what_ended(folder, process, timed_out)


def what_ended(folder: Path, process: Process, timed_out: bool) -> Ended:
    """How a process that was ended had ended, and what it left in its folder."""
    done = folder / OUTCOME
    return Ended(
        done.read_bytes() if done.exists() else None,
        process.returncode,
        _tail(folder / "output"),
        text_of(folder / STATUS),
        timed_out,
    )


def failure(ended: Ended, timeout: float) -> ScriptFailed:
    """The error for a process that left no outcome."""
    learnt = f"Until then: {ended.status or 'no module had been called'}."
    if ended.timed_out:
        return ScriptFailed(
            f"the script was stopped after {timeout:.0f} s without having done its steps. If a step "
            "really takes that long, give --timeout; if it is blocked, what it needs is not here.",
            learnt=learnt,
            traceback=ended.output,
        )
    code = -ended.returncode
    name = signal.Signals(code).name if code in list(signal.Signals) else str(ended.returncode)
    why = " (the system kills with it when memory runs out)" if name == "SIGKILL" else ""
    return ScriptFailed(
        f"the script's process died with {name}{why}.", learnt=learnt, traceback=ended.output
    )


@contextlib.contextmanager
def working_folder() -> Iterator[Path]:
    """A folder for a run's files, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="torchtrim-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def environment_of(script: Script, hide_gpu: bool = False) -> dict[str, str]:
    """What the script's process finds in its environment."""
    environment = environment_of_runs()
    if hide_gpu or script.device not in (None, "cuda"):
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def _wait(
    process: Process,
    timeout: float,
    folder: Path,
    progress: Callable[[str], None],
) -> bool:
    """Wait for the process, a little only once its outcome is there. True if it ran too long."""
    deadline = time.monotonic() + timeout
    settled = False
    said = ""
    while not process.ended():
        if time.monotonic() > deadline:
            return not settled
        if not settled and (folder / OUTCOME).exists():
            settled, deadline = True, time.monotonic() + _GRACE_SECONDS
        status = text_of(folder / STATUS)
        if status and status != said:
            said = status
            progress(said)
        time.sleep(_POLL_SECONDS)
    return False


def text_of(path: Path) -> str:
    """What a file says; empty where there is none."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _tail(path: Path) -> str:
    """The end of what the script printed, from the beginning of a line if there is one."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _TAIL_BYTES, 0))
        text = file.read().decode(errors="replace")
    if size <= _TAIL_BYTES:
        return text
    return "...\n" + (text.partition("\n")[2] or text)
