"""What lint found in files that have not changed since, from the user's cache folder.

What is kept of a file holds while its text is the same, and the texts of the files that it calls functions
of, and lint itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path

import msgspec
from msgspec import Struct

import torchtrim
from torchtrim.core import caches
from torchtrim.linter.files import Linted, Selected, lint_files
from torchtrim.records.files import MOST_BYTES, read_head
from torchtrim.records.finding import Finding
from torchtrim.syncs.lookup import is_from

_MOST = 20_000
_ROOMS = ("linter", "fixes", "rewriter", "source", "syncs", "rules")
Digest = Callable[[str], str]


class _Kept(Struct, array_like=True):
    """Findings of a file, and the digests of the texts that they rest on, by path."""

    texts: dict[str, str]
    findings: tuple[Finding, ...]


def lint_cached(files: Collection[str], selected: Selected, project: Path) -> list[Linted]:
    """What `lint_files` gives, read anew only where something has changed. Errors are not kept."""
    place = _place(project, selected)
    kept, digest = _read(place), cache(_digest)
    known = {one: kept[one] for one in files if one in kept and _holds(kept[one], digest)}
    fresh = {one.path: one for one in lint_files([f for f in files if f not in known], selected)}
    if fresh:
        whole = (one for one in fresh.values() if not one.error and not one.failed)
        new = {one.path: _keep(one, digest) for one in whole}
        _write(place, {**kept, **new}, gone=set(fresh) - set(new))
    return [fresh.get(path) or Linted(path, known[path].findings) for path in files]


def _keep(one: Linted, digest: Digest) -> _Kept:
    return _Kept({path: digest(path) for path in (one.path, *one.used)}, one.findings)


def _holds(kept: _Kept, digest: Digest) -> bool:
    return all(digest(path) == text for path, text in kept.texts.items())


def _digest(path: str) -> str:
    """The digest of a file's text; empty for one that cannot be read."""
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
    """Changes with the code that lints."""
    home = Path(torchtrim.__file__).parent
    times = (
        file.stat().st_mtime_ns for room in _ROOMS for file in sorted((home / room).rglob("*.py"))
    )
    return f"{torchtrim.__version__} {hash(tuple(times))}"


def _read(place: Path) -> dict[str, _Kept]:
    try:
        return msgspec.json.decode(read_head(place, MOST_BYTES), type=dict[str, _Kept])
    except (OSError, msgspec.DecodeError, RecursionError):
        return {}


def _write(place: Path, kept: dict[str, _Kept], gone: set[str]) -> None:
    found = {path: one for path, one in kept.items() if path not in gone}
    newest = dict(list(found.items())[-_MOST:])
    caches.write(place, msgspec.json.encode(newest))
