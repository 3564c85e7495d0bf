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

POSIX = os.name == "posix"
LIFELINE = "TORCHTRIM_LIFELINE"
"""Variable with the lifeline of a rank of `torchtrim run`, whose command line is the user's."""


def end_with_parent(lifeline: int) -> None:
    """End this process group when the parent dies, which closes the other end of the pipe."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(lifeline, 1)
            os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and, if it leads one, its group, and wait for it."""
    if POSIX:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    elif process.poll() is None:
        process.kill()
    process.wait()


class Fresh:
    """Process `python -m entry folder lifeline`; the lifeline is a pipe that this process closes."""

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
        """Return True if the process has ended by itself."""
        return self._process.poll() is not None

    def end(self) -> None:
        """Kill the process and its group, loader workers included, and wait for it."""
        kill_group(self._process)
        self.returncode = self._process.returncode
        for descriptor in self._ends if POSIX else ():
            os.close(descriptor)
        self._ends = (-1, -1)


class Forked:
    """Fork of the warm worker, whose supervisor reports its end and kills it when the channel closes.

    Raises `OSError` if no process was forked.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._text = b""
        self._over = False
        self.returncode = -signal.SIGKILL
        line = self._line()
        if not line:
            raise ConnectionError("the warm worker has died")
        self.pid = int(line)

    def ended(self) -> bool:
        """See `Fresh`."""
        self._channel.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self._line()
            self._over = True
        return self._over

    def end(self) -> None:
        """See `Fresh`."""
        self._channel.setblocking(True)
        with self._channel, contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
            for line in iter(self._line, b""):
                if line != b"ended":
                    self.returncode = int(line)

    def _line(self) -> bytes:
        while b"\n" not in self._text:
            part = self._channel.recv(64)
            if not part:
                return b""
            self._text += part
        line, _, self._text = self._text.partition(b"\n")
        return line


Process = Fresh | Forked
"""Process of a run, leader of its own group. `returncode` is valid after `end`."""
_STACK = "stack"
_SIGNAL = getattr(signal, "SIGUSR1", None)
_SECONDS = 2.0  # arbitrary: faulthandler writes in milliseconds, unless the machine is very busy
_LINE = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


def register_stack_dump(folder: Path) -> None:
    """Have this process write its stacks into the folder on a signal."""
    if _SIGNAL is not None:
        faulthandler.register(_SIGNAL, file=(folder / _STACK).open("w"), all_threads=True)


def dumped_stacks(ranks: Sequence[tuple[int, Path]]) -> list[tuple[str, ...]]:
    """Return the stack of each main thread, innermost frame first, as `"path:line in function"`.

    `ranks`: process numbers and folders. A process that does not answer in time has an empty stack.
    """
    processes = [(pid, folder / _STACK) for pid, folder in ranks]
    for pid, path in processes:
        if _SIGNAL is not None and path.exists():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, _SIGNAL)
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline and any(
        path.exists() and not path.stat().st_size for _, path in processes
    ):
        time.sleep(_SECONDS / 40)
    return [_main_thread(path) for _, path in processes]


def _main_thread(path: Path) -> tuple[str, ...]:
    """Return the stack of the thread listed last, which is the oldest."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ()
    last = re.split(r"^(?:Current t|T)hread .*$", text, flags=re.MULTILINE)[-1]
    return tuple(f"{file}:{line} in {function}" for file, line, function in _LINE.findall(last))
