"""The warm worker of this process: started once, it forks for every run that may begin in a fork."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from torchtrim.records.files import read_head
from torchtrim.runner.processes import Forked, Fresh, Process

_MODULE = "torchtrim.runner.warm_worker"
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
    """A process of `torchtrim.runner.warm_worker`. It ends when the control socket is closed."""

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
        from torchtrim.runner.warm_worker import RunOrder, send_order

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


_NAMES = re.compile(
    r"\b(?:ATEN|BLIS|C10|CUBLAS|CUDA|CUDNN|DNNL|GLIBC|GOMP|HIP|HSA|KINETO|KMP|LD|MALLOC|MKL|NCCL|NPY|NUMEXPR"
    r"|OMP|ONEDNN|OPENBLAS|PYTORCH|ROCM|TORCH|TORCHDYNAMO|TORCHINDUCTOR|TRITON|VECLIB)_[A-Z0-9_]+\b"
    r"|\bPYTHON[A-Z]+\b|\bdotenv\b"
)
_IMPORT = re.compile(r"^[ \t]*(?:from|import)[ \t]+([\w.]+(?:[ \t]*,[ \t]*[\w.]+)*)", re.MULTILINE)
_FROM = re.compile(
    r"^[ \t]*from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)", re.MULTILINE
)
_WORD = re.compile(r"\w+")
_IMPORTS_TORCH = re.compile(r"^(?:from|import)[ \t]+(?:torch|numpy)", re.MULTILINE)
_SETS = re.compile(
    r"""^os\.environ(?:\[["'](\w+)["']\][ \t]*=|\.setdefault\(["'](\w+)["'],)[ \t]*["']([^"'\n]*)["']""",
    re.MULTILINE,
)
_AT_START = ("GLIBC_", "LD_", "MALLOC_", "PYTHON")
_MOST_FILES = 500
_MOST_BYTES = 2**20


def what_it_changes(path: Path) -> str:
    """The name of a variable that the script or a file that it imports speaks of; empty if there is none."""
    for text in _texts(path):
        if found := _NAMES.search(text):
            return found.group()
    return ""


def what_it_sets(path: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """What a script sets before it imports torch, in so many words, for torch to find when it is imported.

    What the interpreter reads when it starts would not be changed by the script either.
    """
    text = next(_texts(path), "")
    first = _IMPORTS_TORCH.search(text)
    found: dict[str, str] = {}
    for written, default, value in _SETS.findall(text[: first.start() if first else 0]):
        name = written or default
        read = _NAMES.fullmatch(name) and not name.startswith(_AT_START)
        if read and (written or name not in environment):
            found[name] = value
    return found


def _texts(path: Path) -> Iterator[str]:
    """The script's text, and of each file beside it that is imported."""
    root = path.parent
    seen: set[Path] = set()
    waiting = [path]
    while waiting and len(seen) < _MOST_FILES:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        try:
            text = read_head(file, _MOST_BYTES).decode("utf-8", errors="replace")
        except OSError:
            continue
        yield text
        waiting += _imported(text, file, root)


def _imported(text: str, file: Path, root: Path) -> Iterator[Path]:
    for names in _IMPORT.findall(text):
        for name in names.split(","):
            yield from _files(root, name.strip().split("."))
    for dots, name, members in _FROM.findall(text):
        base = file.parents[len(dots) - 1] if 0 < len(dots) <= len(file.parents) else root
        parts = [part for part in name.split(".") if part]
        yield from _files(base, parts)
        for member in _WORD.findall(members):
            yield from _files(base, [*parts, member])


def _files(base: Path, parts: list[str]) -> Iterator[Path]:
    """The files that importing a dotted name runs: each package's, then the module."""
    for count in range(1, len(parts) + 1):
        place = base.joinpath(*parts[:count])
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                yield file
