"""Runs of scripts and verbs in forks of a process that has imported torch and torchtrim.

A fork costs milliseconds where an interpreter and its imports take seconds, and keeps what a script sets
(default device, signal handlers, patched classes) from the next. The parent runs no operator and starts no
thread, so a fork finds torch as a fresh process does.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pkgutil
import runpy
import select
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch._dynamo  # noqa: F401
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

import torchtrim
from torchtrim.cli import main as command_line
from torchtrim.core.isolation import DEBUG
from torchtrim.report.html import environment
from torchtrim.runner import warm

SECONDS = 300.0


class Ended(NamedTuple):
    """The end of a process: what it printed, and its exit code, 128 + N for signal N."""

    output: str
    errors: str
    code: int


def forked(
    body: Callable[[], Any], folder: Path, *, exits: bool, seconds: float = SECONDS
) -> Ended:
    """Call `body` in a fork that works in a folder. `exits`: run exit handlers after it, as `python` does."""
    names = [folder.parent / f"{folder.name}.{kind}" for kind in ("out", "err")]
    pid = os.fork()
    if pid == 0:
        _become(body, folder, names, exits)
    descriptor = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([descriptor], [], [], seconds)
    finally:
        os.close(descriptor)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    said = [name.read_text(errors="replace") for name in names]
    if not ready:
        return Ended(said[0], f"{said[1]}\nstill running after {seconds:.0f} s", 124)
    return Ended(said[0], said[1], 128 - code if code < 0 else code)


def _become(body: Callable[[], Any], folder: Path, names: list[Path], exits: bool) -> NoReturn:
    code = 1
    try:
        os.setsid()
        for number, name in ((0, os.devnull), (1, names[0]), (2, names[1])):
            flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            opened = os.open(name, flags, 0o644)
            os.dup2(opened, number)
            os.close(opened)
        os.chdir(folder)
        code = _code_of(body)
        if exits:
            warnings.resetwarnings()  # of what the parent left open
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _code_of(body: Callable[[], Any]) -> int:
    try:
        body()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def plain(path: Path, folder: Path, *args: str) -> Ended:
    """Run a script as `python` does."""

    def body() -> None:
        sys.argv = [str(path), *args]
        sys.path[0] = str(path.parent)
        runpy.run_path(str(path), run_name="__main__")

    return forked(body, folder, exits=True)


def kept(path: Path, folder: Path) -> str:
    """Run a script as `python` does, and return what containers its calls share, and how much these hold.

    Modules that it called are held, since those of a `main` are gone as it returns.
    """
    said = folder / "kept"
    ends = os._exit
    called: dict[int, nn.Module] = {}

    def leave(_: int = 0) -> None:
        said.write_text("\n".join(sorted(_containers(str(path)))))
        ends(0)

    def body() -> None:
        os._exit = leave  # type: ignore[assignment]  # a script may end so
        sys.argv, sys.path[0] = [str(path)], str(path.parent)
        register_module_forward_pre_hook(lambda one, _: called.update({id(one): one}))
        with contextlib.suppress(BaseException):
            runpy.run_path(str(path), run_name="__main__")
        leave()

    forked(body, folder, exits=False)
    return said.read_text() if said.exists() else ""


def _containers(path: str) -> Iterator[str]:
    """Yield the containers that calls of a script's functions and modules share, with their lengths."""
    for one in gc.get_objects():
        if isinstance(one, types.FunctionType) and one.__code__.co_filename == path:
            values = {**(one.__kwdefaults__ or {}), **dict(enumerate(one.__defaults__ or ()))}
        elif isinstance(one, nn.Module) and type(one).__module__ == "__main__":
            values = vars(one)
        else:
            continue
        for name, value in values.items():
            if isinstance(value, (list, dict, set)):
                yield f"{getattr(one, '__qualname__', type(one).__name__)}.{name}: {len(value)}"


def verb(folder: Path, *words: str, exits: bool = False) -> Ended:
    """Run `torchtrim` with these words. `exits`: the script runs in that very process, as under `run`."""

    def body() -> None:
        if exits:
            os.environ.pop(DEBUG, None)  # which shows torchtrim's frames in the script's tracebacks
        if not exits and warm._warm is not None:
            # The worker is no child of the fork, and serves one fork after the other.
            warm._warm.made_by, warm._warm.process.poll = os.getpid(), lambda: None
        sys.argv = ["torchtrim", *words]
        command_line.main()

    return forked(body, folder, exits=exits)


def prepare(folder: Path) -> None:
    """Start the process whose forks run the scripts of verbs."""
    for found in pkgutil.walk_packages(torchtrim.__path__, "torchtrim."):
        if "pytest" not in found.name and not found.name.endswith("__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(found.name)
    for name in environment().list_templates(extensions=["jinja"]):
        environment().get_template(name)  # compiled once, not in each fork
    gc.collect()
    gc.freeze()  # as the process is whose forks run the scripts of verbs
    script = folder / "warm.py"
    script.write_text("")
    warm.warm_up(
        script, "cpu"
    )  # the last, since what is imported sets variables of the environment
