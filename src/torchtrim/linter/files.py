"""Lints and fixes many files, in two worker processes, with results in a fixed order.

Findings are cached in the user's cache folder. An entry is valid while the file, the files whose functions
it calls, and the linter itself are unchanged.
"""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from torchtrim.syncs.lookup import is_from

CODES = ("TT101", "TT102", "TT103", "TT104")
"""The codes that lint can report from source alone."""

_SKIPPED = frozenset(("__pycache__", "node_modules", "site-packages", "dist-packages"))
_PROCESSES = 2
_FEW = 64
_CHUNK = 16
_MARKS = ("pyproject.toml", ".git")


class Selected:
    """A selection of codes by prefix, as `--select` takes it. Raises `UsageError` for a prefix that matches
    no code."""

    def __init__(self, starts: Iterable[str] = ("TT",)) -> None:
        self._starts = tuple(start.strip().upper() for start in starts)
        for start in self._starts:
            if not start or not any(code.startswith(start) for code in CODES):
                raise UsageError(
                    f"lint has no code that starts with {start!r}. Its codes are {', '.join(CODES)}; "
                    "others need a run: torchtrim diagnose."
                )

    @property
    def starts(self) -> tuple[str, ...]:
        """The prefixes."""
        return self._starts

    def __call__(self, code: str) -> bool:
        """Return True if a code is selected."""
        return code.startswith(self._starts)


class Linted(NamedTuple):
    """The result for one file: its findings or the error that kept it from being read, the files whose
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
            found.update(map(_behind, _walked(path.resolve())))
        elif path.is_file():
            found.add(str(path.resolve()))
        elif path.is_symlink():
            raise UsageError(f"{path} is a symbolic link that leads to no file: {path.readlink()}.")
        else:
            raise UsageError(f"{path} does not exist.")
    same: dict[object, list[str]] = {}
    for name in sorted(found):
        same.setdefault(_identity(name), []).append(name)
    return {name: tuple(others) for name, *others in same.values()}


def _behind(name: str) -> str:
    """Resolve a symbolic link; return a dangling one unchanged."""
    return os.path.realpath(name) if Path(name).exists() else name


def _identity(name: str) -> object:
    """Return a key that hard links to one file share."""
    try:
        found = Path(name).stat()
    except OSError:
        return name
    return (found.st_dev, found.st_ino) if found.st_ino else name


def lint_files(files: Collection[str], selected: Selected | None = None) -> list[Linted]:
    """Lint each file. The results are in the order of the files."""
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
    """Find the host-device syncs of files and folders, inferred from their source alone.

    `select`: codes or their prefixes. Paths of findings are absolute. Raises `UsageError` for a missing path
    or a code that lint does not know, `UnreadableInput` for a file that is not Python.
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
    """Return the files' texts with their fixes applied, the same for all hard links to a file. Nothing is
    written."""
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
    """Write the new texts, all or none. Raises `UsageError` if a file changed meanwhile."""
    write_sources(fixed.texts, fixed.before, project)


def project_of(paths: Sequence[Path]) -> Path:
    """Return the folder that edits must stay inside: the nearest with pyproject.toml or .git around the
    given paths."""
    roots = [_root(path.resolve()) for path in paths]
    return Path(os.path.commonpath(roots))


def relative(path: str, base: str) -> str:
    """Return a path relative to a folder, or unchanged if it is outside."""
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


_MOST = 20_000
_ROOMS = ("linter", "fixes", "rewriter", "source", "syncs", "rules")
Digest = Callable[[str], str]


class CachedFindings(Struct, array_like=True):
    """Findings of a file, and the digests of the texts they depend on, by path."""

    texts: dict[str, str]
    findings: tuple[Finding, ...]


def lint_cached(files: Collection[str], selected: Selected, project: Path) -> list[Linted]:
    """Lint files as `lint_files` does, but only those that changed. Errors are not cached."""
    place = _place(project, selected)
    kept, digest = _read(place), cache(_digest)
    known = {one: kept[one] for one in files if one in kept and _holds(kept[one], digest)}
    fresh = {one.path: one for one in lint_files([f for f in files if f not in known], selected)}
    if fresh:
        whole = (one for one in fresh.values() if not one.error and not one.failed)
        new = {one.path: _keep(one, digest) for one in whole}
        _write(place, {**kept, **new}, gone=set(fresh) - set(new))
    return [fresh.get(path) or Linted(path, known[path].findings) for path in files]


def _keep(one: Linted, digest: Digest) -> CachedFindings:
    return CachedFindings({path: digest(path) for path in (one.path, *one.used)}, one.findings)


def _holds(kept: CachedFindings, digest: Digest) -> bool:
    return all(digest(path) == text for path, text in kept.texts.items())


def _digest(path: str) -> str:
    """Return the digest of a file's text, empty if the file cannot be read."""
    try:
        return hashlib.sha256(read_head(Path(path), MOST_BYTES)).hexdigest()[:32]
    except OSError:
        return ""


def _place(project: Path, selected: Selected) -> Path:
    newer = str(is_from("2.15"))
    asked = "\0".join((str(project), *selected.starts, _own_version(), newer))
    return caches.folder() / "lint" / f"{hashlib.sha256(asked.encode()).hexdigest()[:32]}.json"


@cache
def _own_version() -> str:
    """Return a version that changes with the linter's own code."""
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


def _write(place: Path, kept: dict[str, CachedFindings], gone: set[str]) -> None:
    found = {path: one for path, one in kept.items() if path not in gone}
    newest = dict(list(found.items())[-_MOST:])
    caches.write(place, msgspec.json.encode(newest))
