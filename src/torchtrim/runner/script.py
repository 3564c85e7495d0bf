"""Run of an unmodified script in its own process, which leaves no processes behind."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from torchtrim.core.scripts import check_script_file
from torchtrim.dispatch.places import project_of
from torchtrim.errors import ScriptFailed
from torchtrim.runner.processes import Process
from torchtrim.runner.warm import environment_of_runs, start

TASK, OUTCOME, STATUS = "task.json", "outcome.json", "status"
_GRACE_SECONDS = 10.0  # arbitrary, enough to flush output; exit handlers of a script may hang
_POLL_SECONDS = 0.05  # short beside a run's seconds, and no load
_TAIL_BYTES = 4000  # some 50 lines, enough for a traceback


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A script's path or a module's name, and its arguments."""

    name: str
    module: bool
    args: tuple[str, ...]


class Script(NamedTuple):
    """A script or, with `module`, a module to run as one. `timeout`: seconds for one run.

    `streams`: the order of an emulated device's streams: `early`, `late`, `random` or `random:SEED`.
    `processes`: number of ranks; `only`: the rank whose trial to return, or -1 for all ranks.
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
    def command(self) -> Target:
        """The script as its process runs it."""
        name = self.target if self.module else str(self.path)
        return Target(name=name, module=self.module, args=self.args)

    @property
    def project(self) -> Path:
        """The folder of the user's own source."""
        return project_of(self.path or Path.cwd() / "module")

    def check(self) -> None:
        """Raise `UsageError` if the script does not exist."""
        if not self.module:
            check_script_file(self.target)


class Ended(NamedTuple):
    """The end of a run. `outcome`: the outcome file of the process, if it left one."""

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
    """Run `python -m entry FOLDER`, or a fork of a process that has imported torch.

    The process reads its task from the folder, and writes its outcome there. It and its children are dead
    when this returns or raises. `hide_gpu`: hide GPUs from it.
    """
    (folder / TASK).write_bytes(task)
    (folder / OUTCOME).unlink(missing_ok=True)  # of a run that failed
    output = folder / "output"
    process = start(entry, folder, output, environment_of(script, hide_gpu), script.path)
    try:
        timed_out = _wait(process, script.timeout, folder, progress)
    finally:
        process.end()
    return ended_of(folder, process, timed_out)


def environment_of(script: Script, hide_gpu: bool) -> dict[str, str]:
    """Return the environment of the script's process."""
    environment = environment_of_runs()
    if hide_gpu or script.device not in (None, "cuda"):
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def ended_of(folder: Path, process: Process, timed_out: bool) -> Ended:
    """Return the end of a dead process, from its files."""
    done = folder / OUTCOME
    return Ended(
        done.read_bytes() if done.exists() else None,
        process.returncode,
        _tail(folder / "output"),
        text_of(folder / STATUS),
        timed_out,
    )


def failure(ended: Ended, timeout: float) -> ScriptFailed:
    """Return the error for a process without an outcome."""
    learnt = f"Until then: {ended.status or 'no module had been called'}."
    if ended.timed_out:
        return ScriptFailed(
            f"the script was stopped after {timeout:.0f} s without completing its steps. If a "
            "step really takes that long, raise --timeout; if the script is blocked, it may be "
            "waiting for something that is missing here.",
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
    """Return a temporary folder for a run's files."""
    with tempfile.TemporaryDirectory(prefix="torchtrim-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def _wait(process: Process, timeout: float, folder: Path, progress: Callable[[str], None]) -> bool:
    """Wait for the process, only briefly once its outcome exists; return True if it ran too long."""
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
    """Return the text of a file, empty if it does not exist."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _TAIL_BYTES, 0))
        text = file.read().decode(errors="replace")
    if size <= _TAIL_BYTES:
        return text
    return "...\n" + (text.partition("\n")[2] or text)
