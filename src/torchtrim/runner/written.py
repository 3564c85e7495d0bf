"""Files that a run writes into the script's folders, put back before the next run of it.

A run is stopped after a few steps, and another begins where the script begins: it must not find the folder
that `os.makedirs` made in the one before, nor go on from its checkpoint. Python's audit events and
`torch.save` tell what a process creates, and the files it is about to change, which are copied first. A file
created before the first step may be a download or a costly cache: it stays if the script has connected to
another machine, started a program or taken seconds until then, unless a later run fails for it.
Other programs (`subprocess`) and libraries that open files in C are not heard, nor is what is hidden, or
outside of the working folder and the script's project. Other programs may use the same folders meanwhile,
so lines that the script appends to a file stay, and a folder stays if it holds more than the run's own files.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from torchtrim.dispatch.frames import uncompiled
from torchtrim.dispatch.patches import Patches

_LOG = "written"
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SHARE_OF_DISK = 0.25  # Arbitrary; of the free bytes for temporary files, for a copy of one file.
_COSTLY_SECONDS = 3.0  # Arbitrary: about what a run takes anyway.
_FROM_ELSEWHERE = ("socket.connect", "subprocess.Popen", "os.system")
_PATHS = {
    "os.mkdir": ((0, 2),),
    "os.rmdir": ((0, 1),),
    "os.remove": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.symlink": ((1, 2),),
    "os.link": ((1, 3),),
}
"""Where paths, and the descriptors of their folders, are in the arguments of audit events."""
_EVENTS = frozenset((*_PATHS, *_FROM_ELSEWHERE, "open"))
_What = Literal["created", "changed", "removed", "cheap"]


class Entry(msgspec.Struct, frozen=True):
    """A path that a run was about to create, change or, if a folder, remove. `copy`: the file before.

    `cheap`, without a path: what was created before the first step is made again in no time.
    """

    path: str
    what: _What
    in_steps: bool
    copy: str = ""


class Writing:
    """Listens to what this process and its forks write, and keeps a list in the run's folder."""

    def __init__(self, folder: Path, homes: Iterable[str]) -> None:
        self._folder = folder.resolve()
        self._homes = [Path(home).resolve() for home in homes]
        self._known: dict[tuple[Path, bool], _What] = {}
        self._copies: set[Path] = set()
        self._in_steps = self._is_costly = False
        self._began = 0.0
        self._ours = threading.local()

    def install(self) -> None:
        """Begin to listen, until the process ends."""
        self._began = time.monotonic()
        sys.addaudithook(self._heard)
        opened = torch.serialization._open_zipfile_writer

        @functools.wraps(opened)
        def opens(file: Any) -> Any:
            if isinstance(file, (str, os.PathLike)):  # written in C++
                self._heard("open", (os.fspath(file), None, os.O_WRONLY))
            return opened(file)

        Patches().replace(torch.serialization, "_open_zipfile_writer", opens)

    def step_begins(self) -> None:
        """Note that the script trains from now on."""
        seconds = time.monotonic() - self._began
        if not self._in_steps and not self._is_costly and seconds < _COSTLY_SECONDS:
            self._log(Entry("", "cheap", in_steps=True))
        self._in_steps = True

    @uncompiled
    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in _EVENTS:  # most: each `sys._getframe` is one
            return
        if event in _FROM_ELSEWHERE:
            self._is_costly = True
            return
        if event == "open" and not (isinstance(args[2], int) and args[2] & _WRITES):
            return
        if getattr(self._ours, "is_noting", False):
            return
        self._ours.is_noting = True
        try:
            with contextlib.suppress(OSError, ValueError, TypeError, RuntimeError):
                places = _PATHS.get(event, ((0, len(args)),))
                paths = [_path_of(args[at], *args[folder : folder + 1]) for at, folder in places]
                if event == "os.rename":
                    self._note_renamed(*paths)
                else:
                    self._note(*paths, appends=event == "open" and bool(args[2] & os.O_APPEND))
        finally:
            self._ours.is_noting = False

    def _note_renamed(self, path: Path, to: Path) -> None:
        """Note both names, but not the new one of a file that is older than the run and has no copy."""
        self._note(path)
        if self._is_created(path):
            self._note(to)
            for inside in sorted(path.rglob("*")) if path.is_dir() else ():
                if self._is_created(inside):
                    self._note(to / inside.relative_to(path))
        elif path in self._copies:
            self._note(to)

    def _is_created(self, path: Path) -> bool:
        return "created" in (self._known.get((path, when)) for when in (False, True))

    def _note(self, path: Path, *, appends: bool = False) -> None:
        key = path, self._in_steps
        if key in self._known or not self._is_heard(path):
            return
        what: _What = "created"
        if self._known.get((path, False)) is None and os.path.lexists(path):
            if not self._in_steps or appends:
                return
            what = "removed" if path.is_dir() else "changed"
        copy = self._copied(path) if what == "changed" else ""
        if copy:
            self._copies.add(path)
        self._known[key] = what
        self._log(Entry(str(path), what, self._in_steps, copy))

    def _log(self, entry: Entry) -> None:
        with (self._folder / _LOG).open("ab") as log:
            log.write(msgspec.json.encode(entry) + b"\n")

    def _is_heard(self, path: Path) -> bool:
        home = next((one for one in self._homes if path.is_relative_to(one)), None)
        if home is None or home == home.parent or path.is_relative_to(self._folder):
            return False
        inside = path.relative_to(home).parts
        return not any(name.startswith(".") or name == "__pycache__" for name in inside)

    def _copied(self, path: Path) -> str:
        free = shutil.disk_usage(self._folder).free
        if not path.is_file() or path.stat().st_size > _SHARE_OF_DISK * free:
            return ""
        copy = self._folder / f"{_LOG}-{os.getpid()}-{len(self._known)}"
        shutil.copy2(path, copy)
        return str(copy)


def _path_of(name: Any, folder: Any = -1) -> Path:
    path = Path(os.fsdecode(name))
    if isinstance(folder, int) and folder >= 0:
        path = Path(f"/proc/self/fd/{folder}").readlink() / path
    return path.parent.resolve() / path.name


class Leftovers:
    """Costly files that runs of scripts created before their first steps, and left."""

    def __init__(self) -> None:
        self._left: dict[object, list[Entry]] = {}
        self._none_left: set[object] = set()

    def of(self, script: object) -> bool:
        """Return True if runs of the script left something."""
        return bool(self._left.get(script))

    def settle(self, script: object, folder: Path) -> None:
        """Put back what the run in this folder wrote, and note what is costly to make again."""
        found = list(_entries(folder))
        keeps = script not in self._none_left and all(one.what != "cheap" for one in found)
        before = [one for one in found if keeps and not one.in_steps]
        self._left.setdefault(script, []).extend(before)
        _put_back([one for one in found if one not in before])

    def put_back(self, script: object) -> None:
        """Put back what the runs left, and from now on all that one writes."""
        self._none_left.add(script)
        _put_back(self._left.pop(script, []))


def _entries(folder: Path) -> Iterator[Entry]:
    for log in (folder / _LOG, *sorted(folder.glob(f"*/{_LOG}"))):
        if log.exists():
            for line in log.read_bytes().splitlines():
                yield msgspec.json.decode(line, type=Entry)
            log.unlink()


def _put_back(found: list[Entry]) -> None:
    created = [one.path for one in found if one.what == "created"]
    for path in map(Path, reversed(created)):
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink()
    for one in reversed(found):
        with contextlib.suppress(OSError):
            if one.what == "removed":
                Path(one.path).mkdir(parents=True, exist_ok=True)
            elif one.copy and one.path not in created:
                _restore(Path(one.copy), Path(one.path).resolve())


def _restore(copy: Path, path: Path) -> None:
    """Replace a file, or the one that a link leads to, by its copy, in one piece."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        shutil.copy2(copy, beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
