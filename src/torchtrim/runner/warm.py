"""The warm worker of this process, started once, which forks for every run that may begin in a fork."""

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
"""Variable that, set to anything but 0, gives every run a fresh process."""


class _Warm:
    """Process of `torchtrim.runner.warm_worker`, which ends when the control socket is closed."""

    def __init__(self) -> None:
        self.made_for = _relevant_environment()
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
        self._control.close()
        os.close(self._lifeline)
        self.process.kill()
        self.process.wait()


_lock = threading.Lock()
_warm: _Warm | None = None


def environment_of_runs() -> dict[str, str]:
    """Return the environment common to all runs."""
    return {
        "PYTHONHASHSEED": "0",
        **os.environ,
        "KINETO_LOG_LEVEL": "99",
        "PYTHONUNBUFFERED": "1",
    }


def may_fork(path: Path | None, hidden: bool) -> bool:
    """Return True if a run of a script may begin in a fork. `hidden`: real devices are hidden from it.

    A module's file is unknown before its import, and a real device needs a fresh process.
    """
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open"):
        return False
    if path is None or not path.is_file() or os.environ.get(_SWITCH, "0") != "0":
        return False
    has_gpu = os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(map(os.path.exists, _GPUS))
    return (hidden or not has_gpu) and not what_it_changes(path)


def warm_up(path: Path | None, device: str | None) -> None:
    """Start the warm worker if a script may run in its forks, so that it imports torch meanwhile."""
    if may_fork(path, device not in (None, "cuda")):
        with contextlib.suppress(OSError), _lock:
            _ready()


def start(
    entry: str, folder: Path, output: Path, environment: dict[str, str], path: Path | None
) -> Process:
    """Start a run of a script, in a fork if possible, else in a fresh process."""
    hidden = environment.get("CUDA_VISIBLE_DEVICES") == ""
    if entry in _ENTRIES and may_fork(path, hidden):
        for _ in range(2):
            with contextlib.suppress(OSError), _lock:
                return _ready().fork(entry, folder, output, environment)
            end()
    more = what_it_sets(path, environment) if path is not None else {}
    return Fresh(entry, folder, output, {**environment, **more})


def end() -> None:
    """End the warm worker; the next run that may fork starts a new one."""
    global _warm
    with _lock:
        warm, _warm = _warm, None
    if warm is not None and warm.made_by == os.getpid():
        warm.close()


def _ready() -> _Warm:
    global _warm
    if _warm is not None and _warm.made_by == os.getpid():
        if _warm.made_for == _relevant_environment() and _warm.process.poll() is None:
            return _warm
        _warm.close()
    _warm = _Warm()
    return _warm


def _relevant_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _PASSING}


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
_MOST_FILES = 500  # reading more takes longer than the imports that a fork saves
_MOST_BYTES = 2**20  # far above any handwritten file, so that generated ones cost no time


def what_it_changes(path: Path) -> str:
    """Return the first such variable that the script or a file it imports mentions, or an empty string."""
    found = (_NAMES.search(text) for text in _texts(path))
    return next((match.group() for match in found if match), "")


def what_it_sets(path: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a script sets literally before it imports torch, which reads them then.

    Variables that the interpreter reads at its start are left out: no script can set them in time.
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
    """Yield the files that importing a dotted name runs: each package's, then the module."""
    for count in range(1, len(parts) + 1):
        place = base.joinpath(*parts[:count])
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                yield file
