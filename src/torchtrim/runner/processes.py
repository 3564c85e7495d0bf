"""The process of a run: a fresh interpreter, or a fork of one that has imported torch."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

POSIX = os.name == "posix"
LIFELINE = "TORCHTRIM_LIFELINE"
"""The variable with the pipe that ends with the parent, for a process whose command line is a person's."""


def end_with_parent(lifeline: int) -> None:
    """Have this process group end when the other end of a pipe is closed: when the parent is gone."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(lifeline, 1)
            os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


class Process(Protocol):
    """A run's process, which leads a group of its own. `returncode` is known once it was ended."""

    pid: int
    returncode: int

    def ended(self) -> bool:
        """Whether it has ended by itself."""
        ...

    def end(self) -> None:
        """End it and its group, workers too; it is gone when this returns."""
        ...


class Fresh:
    """`python -m entry folder lifeline`. The lifeline is a pipe that ends with this process."""

    def __init__(self, entry: str, folder: Path, output: Path, environment: dict[str, str]) -> None:
        self._ends = os.pipe() if POSIX else (-1, -1)
        self.returncode = 0
        with output.open("wb") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", entry, str(folder), str(self._ends[0])],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=POSIX,
                pass_fds=self._ends[:1] if POSIX else (),
            )
        self.pid = self._process.pid

    def ended(self) -> bool:
        """Whether it has ended by itself."""
        return self._process.poll() is not None

    def end(self) -> None:
        """End it and its group."""
        if POSIX:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        elif self._process.poll() is None:
            self._process.kill()
        self.returncode = self._process.wait()
        for descriptor in self._ends if POSIX else ():
            os.close(descriptor)
        self._ends = (-1, -1)


class Forked:
    """A fork of the warm worker's. What looks after it tells its end, and kills it if the channel closes.

    Raises `OSError` where there is no process.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._text = b""
        self._over = False
        self.returncode = -signal.SIGKILL
        self.pid = int(self._line() or self._gone())

    def ended(self) -> bool:
        """Whether it has ended by itself."""
        self._channel.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self._line()
            self._over = True
        return self._over

    def end(self) -> None:
        """End it and its group."""
        self._channel.setblocking(True)
        with self._channel, contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
            for line in iter(self._line, b""):
                if line != b"ended":
                    self.returncode = int(line)

    def _line(self) -> bytes:
        """The next line; empty where there is none any more."""
        while b"\n" not in self._text:
            part = self._channel.recv(64)
            if not part:
                return b""
            self._text += part
        line, _, self._text = self._text.partition(b"\n")
        return line

    def _gone(self) -> int:
        raise ConnectionError("the warm worker is gone")


STACK = "stack"
_SIGNAL = getattr(signal, "SIGUSR1", None)
_SECONDS = 2.0
_LINE = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


def tells_where(folder: Path) -> None:
    """Have this process write its stacks into the folder when it is asked."""
    if _SIGNAL is not None:
        faulthandler.register(_SIGNAL, file=(folder / STACK).open("w"), all_threads=True)


def asked_where(processes: Sequence[tuple[int, Path]]) -> list[tuple[str, ...]]:
    """The lines at which processes' main threads are, innermost first, as `"path:line in function"`.

    Empty for one that does not tell within two seconds.
    """
    for pid, path in processes:
        if _SIGNAL is not None and path.exists():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, _SIGNAL)
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline and not all(_written(path) for _, path in processes):
        time.sleep(_SECONDS / 40)
    return [_main_thread(path) for _, path in processes]


def _written(path: Path) -> bool:
    return not path.exists() or path.stat().st_size > 0


def _main_thread(path: Path) -> tuple[str, ...]:
    """The last thread that is listed is the one that was there first."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ()
    last = re.split(r"^(?:Current t|T)hread .*$", text, flags=re.MULTILINE)[-1]
    return tuple(f"{file}:{line} in {function}" for file, line, function in _LINE.findall(last))
