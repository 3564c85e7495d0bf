"""Undoes the last write of source, and sees to one that was killed."""

from __future__ import annotations

import contextlib
from pathlib import Path

from torchtrim.errors import TorchtrimError
from torchtrim.rewriter.files import Undone, settle_killed, undo_sources
from torchtrim.rewriter.journal import holder_of, last_write


def undo(start: Path) -> Undone:
    """Take out the last write of source in the project around a path; later edits stay."""
    return undo_sources(start)


def settle(start: Path) -> tuple[str, ...]:
    """Restore or complete a write of source around a path that was killed, and say so."""
    return settle_killed(start)


class Watch:
    """Knows, whatever happens afterwards, which files torchtrim has written around a path since."""

    def __init__(self, start: Path) -> None:
        self._start = start
        self._before = self._last()[0]

    def written(self) -> tuple[Path, ...]:
        """The files of the last write, if there was one since; empty where it was undone."""
        key, paths = self._last()
        return paths if key != self._before else ()

    def _last(self) -> tuple[str, tuple[Path, ...]]:
        with contextlib.suppress(TorchtrimError):
            project = holder_of(self._start)
            write = last_write(project) if project is not None else None
            if project is not None and write is not None:
                return write.key, tuple(project / one.path for one in write.files)
        return "", ()
