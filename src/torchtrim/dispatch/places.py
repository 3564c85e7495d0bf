"""Finds the line of user code that called an operator."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, MemberDescriptorType
from typing import Any, Literal

import torch
from torch.autograd import graph
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

CodeOwner = Literal["torch", "library", "user", "engine"]
CallSite = tuple[CodeType, int]

ENGINE: CodeType = graph._engine_run_backward.__code__
"""The autograd engine's frame: lines below it did not call the operators above it."""

_FUNCTION: CodeType = BackwardCFunction.apply.__code__
_CHECKPOINT: CodeType = CheckpointFunction.backward.__code__
_TORCHTRIM = str(Path(__file__).parent.parent)
_TORCH = str(Path(torch.__file__).parent)
_STDLIB = sysconfig.get_paths()["stdlib"]
_INSTALLED = ("site-packages", "dist-packages")
_OWN_REFERENCES = 3
"""References to a frame's cached variables: the frame, `variables_of`, the argument of `sys.getrefcount`."""


class Places:
    """A finder of the innermost line outside torch, and of the line in the user's project that led there.

    Each code object is classified once and looked up by address, since hashing one takes a microsecond.
    """

    def __init__(self, project: str) -> None:
        self._project = project.rstrip("/\\")
        self._owners: dict[int, CodeOwner] = {id(ENGINE): "engine"}
        self._kept: list[CodeType] = []

    def find(self, frame: FrameType | None) -> tuple[CallSite | None, CallSite | None]:
        """Return `(innermost outside torch, user's own)`; the second is None if the first is the user's."""
        owners = self._owners
        library: CallSite | None = None
        while frame is not None:
            code = frame.f_code
            owner = owners.get(id(code)) or self._judge(code)
            if owner == "user":
                spot = (code, frame.f_lasti)
                return (spot, None) if library is None else (library, spot)
            if owner == "library" and library is None:
                library = (code, frame.f_lasti)
            elif owner == "engine":
                break
            frame = frame.f_back
        return library, None

    def users_line(self, frame: FrameType | None) -> tuple[str, int, bool]:
        """Return path and number of the innermost project line, and True unless the autograd engine is in
        between; `("", 0, False)` without such a line."""
        direct = True
        while frame is not None:
            direct &= frame.f_code is not ENGINE
            if self._owner_of(frame.f_code) == "user":
                return frame.f_code.co_filename, frame.f_lineno, direct
            frame = frame.f_back
        return "", 0, False

    def is_users(self, spot: CallSite) -> bool:
        """Return True if a call site is in the user's own source."""
        return self._owner_of(spot[0]) == "user"

    def is_users_file(self, path: str) -> bool:
        """Return True if a file is the user's own source."""
        return _owner(path, self._project) == "user"

    def is_of_a_library(self, spot: CallSite) -> bool:
        """Return True if a call site is in an installed package other than torch."""
        return self._owner_of(spot[0]) == "library"

    def _owner_of(self, code: CodeType) -> CodeOwner:
        return self._owners.get(id(code)) or self._judge(code)

    def _judge(self, code: CodeType) -> CodeOwner:
        owner = self._owners[id(code)] = _owner(code.co_filename, self._project)
        self._kept.append(code)
        return owner


def _owner(path: str, project: str) -> CodeOwner:
    if path.startswith("<"):
        return "torch"
    path = str(Path(path).absolute())
    if _inside(path, _TORCH) or _inside(path, _TORCHTRIM):
        return "torch"
    installed = any(name in path for name in _INSTALLED)
    if _inside(path, project) and (not installed or any(name in project for name in _INSTALLED)):
        return "user"
    return "library" if installed or not _inside(path, _STDLIB) else "torch"


def _inside(path: str, folder: str) -> bool:
    return path.startswith(folder + os.sep)


def is_in_function(frame: FrameType | None) -> bool:
    """Return True inside the `backward` of a `torch.autograd.Function` other than a checkpoint's."""
    while frame is not None and frame.f_code not in (ENGINE, _CHECKPOINT):
        if frame.f_code is _FUNCTION:
            return True
        frame = frame.f_back
    return False


def line_of(spot: CallSite) -> int:
    """Return the line number of an instruction."""
    return _lines(spot[0]).get(spot[1], spot[0].co_firstlineno)


@functools.lru_cache(maxsize=4096)
def _lines(code: CodeType) -> dict[int, int]:
    return {
        offset: line
        for start, end, line in code.co_lines()
        if line is not None
        for offset in range(start, end, 2)
    }


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a running or suspended function without keeping them alive.

    Before Python 3.13 the frame caches them in `f_locals`, which would keep alive values that the function
    deletes later. Clear that cache unless the script also refers to it, through `locals()`.
    """
    cache = frame.f_locals
    variables = dict(cache)
    is_cached = sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_cached and sys.getrefcount(cache) <= _OWN_REFERENCES:
        cache.clear()
    return variables


def slots_of(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that an object keeps in slots, without running its code."""
    for kind in type(thing).__mro__:
        if "__slots__" in vars(kind):
            for name, one in vars(kind).items():
                if type(one) is MemberDescriptorType:
                    with contextlib.suppress(AttributeError):
                        yield name, one.__get__(thing)


def project_of(script: Path) -> Path:
    """Return the nearest folder above the script with pyproject.toml or .git, or the script's own folder."""
    folder = script.resolve().parent
    for candidate in (folder, *folder.parents):
        if (candidate / "pyproject.toml").exists() or (candidate / ".git").exists():
            return candidate
    return folder
