"""A write of several files that is whole or not at all, whenever it is killed, and can be undone.

The folder `.torchtrim` of the project keeps what every file held before and after. `writing.json` is there
while files are replaced; once all are, it becomes `written.json`, the last write. What finds a `writing.json`
without its writer restores the files, unless all were replaced: then the write is complete.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from torchtrim.errors import UnreadableInput, UsageError
from torchtrim.records.files import decode, read_bounded
from torchtrim.records.source_write import FileWrite, SourceWrite

FOLDER = ".torchtrim"
_PENDING, _WRITTEN, _NEW = "writing.json", "written.json", "new.json"
_MOST_BYTES = 2**28
_IGNORED = b"# What torchtrim keeps to undo its last write of source.\n*\n"
Check = Callable[[Path, Path], str | None]


class Restored(NamedTuple):
    """What became of a write that was killed: whether its files are as they were before it, and which."""

    undone: bool
    paths: tuple[Path, ...]


def last_write(project: Path) -> SourceWrite | None:
    """The last write of source in a project that was not undone. Raises `UnreadableInput`."""
    return _load(_folder(project) / _WRITTEN)


def holder_of(path: Path, *, pending: bool = False) -> Path | None:
    """The folder at or above a path that keeps the newest write, of this user's own folders."""
    names = (_PENDING, _NEW) if pending else (_WRITTEN,)
    start, found = Path(os.path.realpath(path)), []
    for candidate in (start, *start.parents):
        for name in names:
            with contextlib.suppress(OSError):
                if _is_own(_folder(candidate)):
                    found.append(((_folder(candidate) / name).stat().st_mtime_ns, candidate))
    return max(found)[1] if found else None


def new_write(project: Path, changes: Sequence[tuple[Path, bytes, bytes]]) -> SourceWrite:
    """A write of files: the path of each, and its bytes before and after."""
    files = tuple(
        FileWrite(path=path.relative_to(project).as_posix(), before=before, after=after)
        for path, before, after in changes
    )
    return SourceWrite(key=uuid.uuid4().hex, when=time.strftime("%Y-%m-%d %H:%M:%S"), files=files)


def carry_out(write: SourceWrite, project: Path) -> None:
    """Replace the files of a write, all or none. Hard links to one file stay links to one file.

    Raises `UsageError` where the disk or a folder does not take them: then none was replaced.
    """
    folder = _folder(project)
    try:
        folder.mkdir(exist_ok=True)
        (folder / ".gitignore").write_bytes(_IGNORED)
    except OSError as error:
        raise UsageError(
            f"cannot write {folder}, which keeps what undoing needs: {error.strerror}. Nothing was written."
        ) from None
    with _locked(folder):
        try:
            _store(write, folder / _PENDING)
            for new, path in _staged(write, project):
                new.replace(path)
            _complete(write, folder)
        except BaseException as error:
            settled = _settle(project, folder)
            if isinstance(error, OSError):
                if settled is not None and not settled.undone:
                    return
                raise UsageError(
                    f"cannot write {error.filename}: {error.strerror}. Nothing was written."
                ) from None
            raise


def _staged(write: SourceWrite, project: Path) -> list[tuple[Path, Path]]:
    """The new files, each beside the one it replaces; hard links to one file are so again."""
    first: dict[tuple[int, int], Path] = {}
    staged = []
    for one in write.files:
        path = project / one.path
        found = path.stat()
        new = _name_beside(path)
        known = first.setdefault((found.st_dev, found.st_ino), new)
        if known is new or not found.st_ino:
            _beside(path, one.after)
        else:
            new.unlink(missing_ok=True)
            new.hardlink_to(known)
        staged.append((new, path))
    return staged


def restored(project: Path, why_not: Check) -> Restored | None:
    """Restore or complete a write that was killed; None where none was.

    `why_not(path, project)` says why a file must not be edited, None if it may.
    """
    folder = _folder(project)
    if not any((folder / name).is_file() for name in (_PENDING, _NEW)):
        return None
    with _locked(folder):
        return _settle(project, folder, why_not)


def _settle(project: Path, folder: Path, why_not: Check | None = None) -> Restored | None:
    write = _load(folder / _PENDING)
    (folder / _NEW).unlink(missing_ok=True)
    if write is None:
        return None
    if why_not is not None:
        _check(write, project, why_not)
    paths = tuple(project / one.path for one in write.files)
    now = [held(path) for path in paths]
    for path in paths:
        _name_beside(path).unlink(missing_ok=True)
    if all(bytes_ == one.after for bytes_, one in zip(now, write.files, strict=True)):
        _complete(write, folder)
        return Restored(False, paths)
    for path, bytes_, one in zip(paths, now, write.files, strict=True):
        if bytes_ == one.after:
            _beside(path, one.before).replace(path)
    (folder / _PENDING).unlink(missing_ok=True)
    return Restored(True, paths)


def _check(write: SourceWrite, project: Path, why_not: Check) -> None:
    for one in write.files:
        path = project / one.path
        if path.exists() and (reason := why_not(path, project)) is not None:
            raise UsageError(
                f"{_folder(project) / _PENDING} is of a write that was killed, and {path} cannot be "
                f"restored: {reason}. Make it writable and run this again, or delete {_PENDING}."
            )


def _complete(write: SourceWrite, folder: Path) -> None:
    pending, written = folder / _PENDING, folder / _WRITTEN
    if not write.undoes:
        pending.replace(written)
        return
    if write.remaining:
        left = msgspec.structs.replace(write, files=write.remaining, undoes=False, remaining=())
        _store(left, written)
    else:
        written.unlink(missing_ok=True)
    pending.unlink(missing_ok=True)


def _store(write: SourceWrite, path: Path) -> None:
    new = path.with_name(_NEW)
    new.write_bytes(msgspec.json.encode(write))
    new.replace(path)


def held(path: Path) -> bytes | None:
    """What a file holds, None if it cannot be read."""
    try:
        return read_bounded(path, _MOST_BYTES)
    except UnreadableInput:
        return None


def _name_beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.torchtrim")


def _beside(path: Path, content: bytes) -> Path:
    """A file with the content next to the one it will replace, of its mode."""
    new = _name_beside(path)
    with new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.chmod(stat.S_IMODE(path.stat().st_mode))
    return new


def _folder(project: Path) -> Path:
    return project / FOLDER


def _load(path: Path) -> SourceWrite | None:
    if not path.is_file():
        return None
    write = decode(read_bounded(path, _MOST_BYTES), SourceWrite, str(path))
    project = path.parent.parent.resolve()
    for one in (*write.files, *write.remaining):
        inside = (project / one.path).resolve().is_relative_to(project)
        if not inside or ".git" in Path(one.path).parts:
            raise UnreadableInput(
                f"{path} names {one.path}, which is no source of {project}. Delete {path.name}: it is "
                "damaged, or came with files that someone else made."
            )
    return write


def _is_own(folder: Path) -> bool:
    """Whether the folder is this user's: another's must not say what to write."""
    return not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One writer at a time; a process that dies gives the lock back."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)
