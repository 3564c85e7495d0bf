"""A process that has imported torch and forks for each trial, to save the trial its imports.

`python -m torchtrim.runner.warm_worker CONTROL LIFELINE`: both are file descriptors. It runs no
operator and starts no thread; each fork acts as `python -m ENTRY FOLDER LIFELINE` would.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

import msgspec

IMPORTED = ("torch", "torch._dynamo", "torchtrim.runner.worker")
"""Imports of every trial; creating an optimizer imports the second."""

_LENGTH = 8  # bytes of a message's length, more than any message needs
_CACHE = "TORCHINDUCTOR_CACHE_DIR"


class RunOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Order of one run: `python -m entry folder`, with its output in a file."""

    entry: str
    folder: str
    output: str
    cwd: str
    environment: dict[str, str]


def send_order(control: socket.socket, order: RunOrder, channel: socket.socket) -> None:
    """Send an order. The channel then receives the process number, its end, and its exit status."""
    text = msgspec.json.encode(order)
    socket.send_fds(control, [len(text).to_bytes(_LENGTH, "big")], [channel.fileno()])
    control.sendall(text)


def serve(control: socket.socket, lifeline: int) -> None:
    """Fork a supervisor for each order, until the other end is closed."""
    while (received := _next_order(control)) is not None:
        order, channel = received
        with channel:
            if _fork() == 0:
                control.close()
                _supervise(order, channel, lifeline)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # collect the supervisors that have ended
                pass


def _next_order(control: socket.socket) -> tuple[RunOrder, socket.socket] | None:
    header, descriptors, _, _ = socket.recv_fds(control, _LENGTH, 1)
    if not header:
        return None
    text = b""
    length = int.from_bytes(header, "big")
    while len(text) < length:
        part = control.recv(length - len(text))
        if not part:
            return None
        text += part
    return msgspec.json.decode(text, type=RunOrder), socket.socket(fileno=descriptors[0])


def _fork() -> int:
    """Fork without Python's warning of threads: those of numpy and others handle forks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _supervise(order: RunOrder, channel: socket.socket, lifeline: int) -> NoReturn:
    """Fork the run, report its end, and kill its group on request or when the channel closes.

    The run stays a zombie until then, so that no other process gets its number.
    """
    pid = _fork()
    if pid == 0:
        _become(order, channel, lifeline)
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(pid)
        ready, _, _ = select.select([channel.fileno(), descriptor], [], [])
        if channel.fileno() not in ready:
            channel.sendall(b"ended\n")
            channel.recv(1)
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        channel.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _become(order: RunOrder, channel: socket.socket, lifeline: int) -> NoReturn:
    try:
        os.setsid()
        channel.sendall(f"{os.getpid()}\n".encode())
        channel.close()
        _open_as(0, os.devnull, os.O_RDONLY)
        _open_as(1, order.output, os.O_WRONLY)
        os.dup2(1, 2)
        os.chdir(order.cwd)
        os.environ.clear()
        os.environ.update(order.environment)
        sys.argv = [sys.argv[0], order.folder, str(lifeline)]
        importlib.import_module(order.entry).main()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _open_as(number: int, path: str, flags: int) -> None:
    opened = os.open(path, flags)
    os.dup2(opened, number)
    os.close(opened)


def main() -> None:
    """Import the modules of trials, then serve."""
    control, lifeline = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    os.set_inheritable(lifeline, False)
    has_cache = _CACHE in os.environ
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if not has_cache and _CACHE in os.environ:
        with contextlib.suppress(OSError):
            Path(os.environ[_CACHE]).rmdir()  # torch has made an empty folder
    gc.collect()
    gc.freeze()
    serve(control, lifeline)


if __name__ == "__main__":
    main()
