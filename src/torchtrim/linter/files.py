"""Lints and fixes many files: which ones, in two processes, in an order that does not depend on them."""

from __future__ import annotations

import gc
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torchtrim.core.isolation import Failure, collected, note
from torchtrim.errors import UnreadableInput, UsageError
from torchtrim.linter.text import fixed_text, lint_text
from torchtrim.records.finding import Finding
from torchtrim.rewriter.edits import diff_of
from torchtrim.rewriter.files import why_not, write_sources
from torchtrim.source.source import read_source

CODES = ("TT101", "TT102", "TT103", "TT104")
"""What a source alone can tell."""

_SKIPPED = frozenset(("__pycache__", "node_modules", "site-packages", "dist-packages"))
_PROCESSES = 2
_FEW = 64
_CHUNK = 16
_MARKS = ("pyproject.toml", ".git")


class Selected:
    """Codes by their beginnings, as `--select` takes them. Raises `UsageError` for one of no code."""

    def __init__(self, starts: Iterable[str] = ("TT",)) -> None:
        self._starts = tuple(start.strip().upper() for start in starts)
        for start in self._starts:
            if not start or not any(code.startswith(start) for code in CODES):
                raise UsageError(
                    f"no code of lint begins with {start!r}. There are {', '.join(CODES)}; the others need "
                    "a run: torchtrim diagnose."
                )

    @property
    def starts(self) -> tuple[str, ...]:
        """The beginnings."""
        return self._starts

    def __call__(self, code: str) -> bool:
        """Whether a code is wanted."""
        return code.startswith(self._starts)


class Linted(NamedTuple):
    """What one file gave: its findings, or why it was not read; the files that it calls functions of; and the
    fixes that failed on it."""

    path: str
    findings: tuple[Finding, ...] = ()
    error: str = ""
    used: tuple[str, ...] = ()
    failed: tuple[Failure, ...] = ()


class FixedFiles(NamedTuple):
    """What fixing gave: new texts and those before, by path; how many fixes; what was not written, why."""

    texts: dict[str, str]
    before: dict[str, str]
    applied: int
    refused: dict[str, str]

    def diff(self, base: str) -> str:
        """All changes, with paths relative to a folder."""
        return "".join(
            diff_of(relative(path, base), self.before[path], text)
            for path, text in sorted(self.texts.items())
        )


def files_of(paths: Sequence[Path]) -> dict[str, tuple[str, ...]]:
    """The Python files that are named, and those in the folders that are, by path: each with its hard links.

    A file with several names is given once. A symbolic link stands for the file behind it. Of a folder,
    hidden files, virtual environments and installed packages in it are left out; one that is named itself
    is walked. Raises `UsageError` for what is not there.
    """
    found: set[str] = set()
    for path in paths:
        if path.is_dir():
            found.update(map(_behind, _walked(path.resolve())))
        elif path.is_file():
            found.add(str(path.resolve()))
        elif path.is_symlink():
            raise UsageError(f"{path} is a symbolic link that leads to no file: {path.readlink()}.")
        else:
            raise UsageError(f"there is no file or folder {path}.")
    same: dict[object, list[str]] = {}
    for name in sorted(found):
        same.setdefault(_identity(name), []).append(name)
    return {name: tuple(others) for name, *others in same.values()}


def _behind(name: str) -> str:
    """The path of the file that a link leads to; its own where there is none."""
    return os.path.realpath(name) if Path(name).exists() else name


def _identity(name: str) -> object:
    """What hard links to one file have in common."""
    try:
        found = Path(name).stat()
    except OSError:
        return name
    return (found.st_dev, found.st_ino) if found.st_ino else name


def lint_files(files: Collection[str], selected: Selected | None = None) -> list[Linted]:
    """What each file gives, in the order of the files."""
    linted = _linted(files, selected or Selected())
    for one in linted:
        for failure in one.failed:
            note(failure)
    return linted


def _linted(files: Collection[str], selected: Selected) -> list[Linted]:
    lint = partial(_lint, selected=selected)
    if len(files) < _FEW or (os.cpu_count() or 1) < _PROCESSES:
        return list(map(lint, files))
    with ProcessPoolExecutor(_PROCESSES, initializer=gc.disable) as pool:
        return list(pool.map(lint, files, chunksize=_CHUNK))


def lint(*paths: str | Path, select: Iterable[str] = ("TT",)) -> tuple[Finding, ...]:
    """Host-device syncs that files and folders would have, inferred from their source alone.

    `select`: codes, or their beginnings. Paths of findings are absolute. Raises `UsageError` for a path
    that is not there or a code that lint does not know, `UnreadableInput` for a file that is no Python.
    """
    linted = lint_files(files_of([Path(path) for path in paths]), Selected(select))
    for one in linted:
        if one.error:
            raise UnreadableInput(one.error)
    return tuple(found for one in linted for found in one.findings)


def fix_files(
    files: Mapping[str, Sequence[str]],
    selected: Selected,
    project: Path,
    *,
    unsafe: bool = False,
) -> FixedFiles:
    """The files' texts with their fixes applied, one for all hard links to it. Nothing is written yet."""
    fixed = FixedFiles({}, {}, 0, {})
    applied = 0
    for name in files:
        try:
            before = read_source(Path(name))[0]
            text, count = fixed_text(name, before, selected, unsafe=unsafe)
        except UnreadableInput:
            continue
        if text == before:
            continue
        names = (name, *files[name])
        reasons = {one: why_not(Path(one), project) for one in names}
        refused = {one: reason for one, reason in reasons.items() if reason is not None}
        fixed.refused.update(refused)
        if refused:
            continue
        fixed.texts.update(dict.fromkeys(names, text))
        fixed.before.update(dict.fromkeys(names, before))
        applied += count
    return fixed._replace(applied=applied)


def write_fixed(fixed: FixedFiles, project: Path) -> None:
    """Write the new texts, all or none. Raises `UsageError` where a file changed meanwhile."""
    write_sources(fixed.texts, fixed.before, project)


def project_of(paths: Sequence[Path]) -> Path:
    """The folder that edits stay inside: the nearest with pyproject.toml or .git around the given paths."""
    roots = [_root(path.resolve()) for path in paths]
    return Path(os.path.commonpath(roots))


def relative(path: str, base: str) -> str:
    """A path as people read it: relative to a folder, where it is in it."""
    return path.removeprefix(base.rstrip("/") + "/")


def _root(path: Path) -> Path:
    folder = path if path.is_dir() else path.parent
    for candidate in (folder, *folder.parents):
        if any((candidate / mark).exists() for mark in _MARKS):
            return candidate
    return folder


def _walked(folder: Path) -> Iterator[str]:
    for top, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _is_skipped(Path(top), name))
        for name in names:
            if name.endswith(".py") and not name.startswith("."):
                yield str(Path(top, name))


def _is_skipped(top: Path, name: str) -> bool:
    hidden = name.startswith(".") or name in _SKIPPED
    return hidden or (top / name / "pyvenv.cfg").exists()


def _lint(name: str, selected: Selected) -> Linted:
    try:
        text = read_source(Path(name))[0]
        used: set[str] = set()
        with collected() as failed:
            found = tuple(lint_text(name, text, selected, used))
        return Linted(name, found, used=tuple(sorted(used)), failed=tuple(dict.fromkeys(failed)))
    except UnreadableInput as error:
        return Linted(name, error=str(error))
    finally:
        gc.collect(0)
