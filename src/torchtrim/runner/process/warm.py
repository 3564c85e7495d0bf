"""The warm worker of this process: started once, it forks for every run that may begin in a fork."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from torchtrim.runner.process.processes import Forked, Fresh, Process
from torchtrim.runner.process.read_at_import import what_it_changes, what_it_sets

_MODULE = "torchtrim.runner.process.warm_worker"
_ENTRIES = (
    "torchtrim.runner.worker",
    "torchtrim.runner.stream_worker",
    "torchtrim.runner.stage_worker",
)
_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_PASSING = frozenset(("PYTEST_CURRENT_TEST", "PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES"))
_SWITCH = "TORCHTRIM_FRESH"
"""Set to anything but 0, every run gets a fresh process."""


class Warm:
    """A process of `torchtrim.runner.process.warm_worker`. It ends when the control socket is closed."""

    def __init__(self) -> None:
        self.made_for = _settled()
        self.made_by = os.getpid()
        self._control, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        environment = {**environment_of_runs(), "CUDA_VISIBLE_DEVICES": ""}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(theirs.fileno()), str(lifeline)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
                pass_fds=(theirs.fileno(), lifeline),
            )
        os.close(lifeline)

    def fork(self, entry: str, folder: Path, output: Path, environment: dict[str, str]) -> Forked:
        """Have it fork. Raises `OSError` where it is gone."""
        from torchtrim.runner.process.warm_worker import RunOrder, send_order

        output.touch()
        ours, theirs = socket.socketpair()
        order = RunOrder(
            entry=entry,
            folder=str(folder),
            output=str(output),
            cwd=str(Path.cwd()),
            environment=environment,
        )
        try:
            with theirs:
                send_order(self._control, order, theirs)
            return Forked(ours)
        except BaseException:
            ours.close()
            raise

    def close(self) -> None:
        """End it, and what it runs."""
        self._control.close()
        os.close(self._lifeline)
        self.process.kill()
        self.process.wait()


_lock = threading.Lock()
_warm: Warm | None = None


def environment_of_runs() -> dict[str, str]:
    """What every run's process finds in its environment."""
    return {
        "PYTHONHASHSEED": "0",
        **os.environ,
        "KINETO_LOG_LEVEL": "99",
        "PYTHONUNBUFFERED": "1",
    }


def may_fork(path: Path | None, hidden: bool) -> bool:
    """Whether a run of a script may begin in a fork. `hidden`: it sees no real device.

    A module's file is not known before it is imported, and a real device wants a process of its own.
    """
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open"):
        return False
    if path is None or not path.is_file() or os.environ.get(_SWITCH, "0") != "0":
        return False
    return (hidden or not _has_gpu()) and not what_it_changes(path)


def warm_up(path: Path | None, device: str | None) -> None:
    """Start the warm worker if a script may run in its forks, so that it imports torch meanwhile."""
    if may_fork(path, device not in (None, "cuda")):
        with contextlib.suppress(OSError), _lock:
            _ready()


def start(
    entry: str,
    folder: Path,
    output: Path,
    environment: dict[str, str],
    path: Path | None,
) -> Process:
    """The process of a run of a script: a fork where that may be, else a fresh one."""
    hidden = environment.get("CUDA_VISIBLE_DEVICES") == ""
    if entry in _ENTRIES and may_fork(path, hidden):
        for _ in range(2):
            with contextlib.suppress(OSError), _lock:
                return _ready().fork(entry, folder, output, environment)
            end()
    more = what_it_sets(path, environment) if path is not None else {}
    return Fresh(entry, folder, output, {**environment, **more})


def end() -> None:
    """End the warm worker; the next run that may fork starts another."""
    global _warm
    with _lock:
        warm, _warm = _warm, None
    if warm is not None and warm.made_by == os.getpid():
        warm.close()


def _ready() -> Warm:
    """The warm worker, a new one where there is none or the environment has changed."""
    global _warm
    if _warm is not None and _warm.made_by == os.getpid():
        if _warm.made_for == _settled() and _warm.process.poll() is None:
            return _warm
        _warm.close()
    _warm = Warm()
    return _warm


def _settled() -> dict[str, str]:
    """The environment that a process would begin with, without what says nothing."""
    return {name: value for name, value in os.environ.items() if name not in _PASSING}


def _has_gpu() -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(map(os.path.exists, _GPUS))


atexit.register(end)
