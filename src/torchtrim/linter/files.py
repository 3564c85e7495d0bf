"""Lints and fixes many files, in two worker processes, with results in a fixed order.

Findings are cached in the user's cache folder. An entry is valid while the file, the files whose functions
it calls, and the linter itself are unchanged.
"""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

import torchtrim
from torchtrim.core import caches
from torchtrim.core.isolation import Failure, collected, note
from torchtrim.errors import UnreadableInput, UsageError
from torchtrim.linter.text import fixed_text, lint_text
from torchtrim.records.files import MOST_BYTES, read_head
from torchtrim.records.finding import Finding
from torchtrim.rewriter.edits import diff_of
from torchtrim.rewriter.files import why_not, write_sources
from torchtrim.source.source import read_source
from torchtrim.syncs.base import SYNC_CODES
from torchtrim.syncs.lookup import is_from

_SKIPPED = frozenset(("__pycache__", "node_modules", "site-packages", "dist-packages"))
_PROCESSES = 2  # beside the user's own work: more would slow an editor or a commit hook
_FEW = 64  # files that take less time than starting a process and importing the linter there
_CHUNK = 16  # small enough that both processes end at about the same time
_MARKS = ("pyproject.toml", ".git")


class Selected:
    """A selection of codes by prefix, as in `--select`. Raises `UsageError` for a prefix that matches
    no code."""

    def __init__(self, starts: Iterable[str] = ("TT",)) -> None:
        self.starts = tuple(start.strip().upper() for start in starts)
        for start in self.starts:
            if not start or not any(code.startswith(start) for code in SYNC_CODES):
                raise UsageError(
                    f"lint has no code that starts with {start!r}. Its codes are {', '.join(SYNC_CODES)}; "
                    "others need a run: torchtrim diagnose."
                )

    def __call__(self, code: str) -> bool:
        """Return True if a code is selected."""
        return code.startswith(self.starts)


class Linted(NamedTuple):
    """The result for one file: its findings or the error that prevented reading it, the files whose
    functions it calls, and the fixes that failed on it."""

    path: str
    findings: tuple[Finding, ...] = ()
    error: str = ""
    used: tuple[str, ...] = ()
    failed: tuple[Failure, ...] = ()


class FixedFiles(NamedTuple):
    """The result of fixing: texts before and after by path, the number of fixes, and the reason for each
    refused file."""

    texts: dict[str, str]
    before: dict[str, str]
    applied: int
    refused: dict[str, str]

    def diff(self, base: str) -> str:
        """Return all changes as a diff, with paths relative to a folder."""
        return "".join(
            diff_of(relative(path, base), self.before[path], text)
            for path, text in sorted(self.texts.items())
        )


def files_of(paths: Sequence[Path]) -> dict[str, tuple[str, ...]]:
    """Return the Python files among and below `paths`, by path, each with its other hard links.

    A file with several names is returned once, and symbolic links are resolved. Inside folders, skip hidden
    files, virtual environments and installed packages, unless the path itself names one. Raises `UsageError`
    for a missing path.
    """
    found: set[str] = set()
    for path in paths:
        if path.is_dir():
            for name in _walked(path.resolve()):
                # A dangling link keeps its name.
                found.add(os.path.realpath(name) if Path(name).exists() else name)
        elif path.is_file():
            found.add(str(path.resolve()))
        elif path.is_symlink():
            raise UsageError(f"{path} is a broken symbolic link to {path.readlink()}.")
        else:
            raise UsageError(f"{path} does not exist.")
    same: dict[object, list[str]] = {}
    for name in sorted(found):
        same.setdefault(_identity(name), []).append(name)
    return {name: tuple(others) for name, *others in same.values()}


def _identity(name: str) -> object:
    try:
        status = Path(name).stat()
    except OSError:
        return name
    return (status.st_dev, status.st_ino) if status.st_ino else name


def lint_files(files: Collection[str], selected: Selected | None = None) -> list[Linted]:
    """Lint each file. The results are in the order of the files."""
    lint = partial(_lint, selected=selected or Selected())
    if len(files) < _FEW or (os.cpu_count() or 1) < _PROCESSES:
        results = list(map(lint, files))
    else:
        with ProcessPoolExecutor(_PROCESSES, initializer=gc.disable) as pool:
            results = list(pool.map(lint, files, chunksize=_CHUNK))
    for result in results:
        for failure in result.failed:
            note(failure)
    return results


def lint(*paths: str | Path, select: Iterable[str] = ("TT",)) -> tuple[Finding, ...]:
    """Find the host-device syncs of files and folders, inferred from their source alone.

    `select`: codes or their prefixes. Paths of findings are absolute. Raises `UsageError` for a missing path
    or a code that lint does not know, `UnreadableInput` for a file that is not Python.
    """
    results = lint_files(files_of([Path(path) for path in paths]), Selected(select))
    if error := next((result.error for result in results if result.error), ""):
        raise UnreadableInput(error)
    return tuple(finding for result in results for finding in result.findings)


def fix_files(
    files: Mapping[str, Sequence[str]],
    selected: Selected,
    project: Path,
    *,
    unsafe: bool = False,
) -> FixedFiles:
    """Return the files' texts with their fixes applied, the same for all hard links to a file. Does not
    write the files."""
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
        if refused := {one: reason for one, reason in reasons.items() if reason is not None}:
            fixed.refused.update(refused)
            continue
        fixed.texts.update(dict.fromkeys(names, text))
        fixed.before.update(dict.fromkeys(names, before))
        applied += count
    return fixed._replace(applied=applied)


def write_fixed(fixed: FixedFiles, project: Path) -> None:
    """Write the new texts, all or none. Raises `UsageError` if a file changed meanwhile."""
    write_sources(fixed.texts, fixed.before, project)


def project_of(paths: Sequence[Path]) -> Path:
    """Return the folder that edits must stay inside: the nearest with pyproject.toml or .git around the
    given paths."""
    return Path(os.path.commonpath([_root(path.resolve()) for path in paths]))


def relative(path: str, base: str) -> str:
    """Return a path relative to a folder, or unchanged if it is outside."""
    return path.removeprefix(base.rstrip("/") + "/")


def _root(path: Path) -> Path:
    folder = path if path.is_dir() else path.parent
    around = (folder, *folder.parents)
    return next((root for root in around if any((root / m).exists() for m in _MARKS)), folder)


def _walked(folder: Path) -> Iterator[str]:
    for top, folders, names in os.walk(folder):
        shown = (name for name in folders if not name.startswith(".") and name not in _SKIPPED)
        folders[:] = sorted(name for name in shown if not Path(top, name, "pyvenv.cfg").exists())
        for name in names:
            if name.endswith(".py") and not name.startswith("."):
                yield str(Path(top, name))


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


_MOST = 20_000  # files in the cache: more than a large project has, in a few MiB
_ROOMS = ("linter", "fixes", "rewriter", "source", "syncs", "rules")


class CachedFindings(Struct, array_like=True):
    """Findings of a file, and the digests of the texts they depend on, by path."""

    texts: dict[str, str]
    findings: tuple[Finding, ...]


def lint_cached(files: Collection[str], selected: Selected, project: Path) -> list[Linted]:
    """Lint files as `lint_files` does, but only those that changed. Errors are not cached."""
    key = "\0".join((str(project), *selected.starts, _own_version(), str(is_from("2.15"))))
    place = caches.folder() / "lint" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    cached, digest = _read(place), cache(_digest)
    known = {
        name: entry
        for name in files
        if (entry := cached.get(name)) is not None
        and all(digest(path) == text for path, text in entry.texts.items())
    }
    fresh = {one.path: one for one in lint_files([f for f in files if f not in known], selected)}
    for path, result in fresh.items():
        cached.pop(path, None)
        if not result.error and not result.failed:
            texts = {name: digest(name) for name in (path, *result.used)}
            cached[path] = CachedFindings(texts, result.findings)
    if fresh:
        caches.write(place, msgspec.json.encode(dict(list(cached.items())[-_MOST:])))
    return [fresh.get(path) or Linted(path, known[path].findings) for path in files]


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(read_head(Path(path), MOST_BYTES)).hexdigest()[:32]
    except OSError:
        return ""


@cache
def _own_version() -> str:
    home = Path(torchtrim.__file__).parent
    times = (
        file.stat().st_mtime_ns for room in _ROOMS for file in sorted((home / room).rglob("*.py"))
    )
    return f"{torchtrim.__version__} {hash(tuple(times))}"


def _read(place: Path) -> dict[str, CachedFindings]:
    try:
        return msgspec.json.decode(read_head(place, MOST_BYTES), type=dict[str, CachedFindings])
    except (OSError, msgspec.DecodeError, RecursionError):
        return {}
