"""Findings of host-device syncs in source, and edits of the source on request."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from torchtrim.errors import TorchtrimError
from torchtrim.linter.files import (
    FixedFiles,
    Linted,
    Selected,
    files_of,
    fix_files,
    lint_cached,
    lint_files,
    project_of,
    relative,
    write_fixed,
)
from torchtrim.records.finding import Suggestion
from torchtrim.records.report import Report
from torchtrim.report import assemble
from torchtrim.rewriter.files import holder_of, last_write, settle_killed, undo_sources


class Checked(NamedTuple):
    """Result of linting: the report, the unreadable files, and the edits if requested."""

    report: Report
    errors: tuple[str, ...]
    fixed: FixedFiles | None


def lint_report(
    paths: Sequence[Path],
    select: Iterable[str] = ("TT",),
    *,
    fix: bool = False,
    unsafe: bool = False,
    write: bool = True,
    cached: bool = False,
) -> Checked:
    """Lint files and folders; findings have paths relative to the current folder.

    `cached`: reuse the findings of unchanged files. `fix`: apply the fixes that are safe without a run, with
    `unsafe` also others, and `write` them.
    """
    selected, files, project = Selected(select), files_of(paths), project_of(paths)
    fixed = None
    if fix:
        settle(project)
        fixed = fix_files(files, selected, project, unsafe=unsafe)
        if write:
            write_fixed(fixed, project)
    linted = lint_cached(files, selected, project) if cached else lint_files(files, selected)
    errors = tuple(one.error for one in linted if one.error)
    return Checked(_report(linted, paths, errors), errors, fixed)


def _report(linted: Sequence[Linted], paths: Sequence[Path], errors: tuple[str, ...]) -> Report:
    base = str(Path.cwd())
    findings = tuple(
        replace(found, path=relative(found.path, base), fix=_near(found.fix, base))
        for one in linted
        for found in one.findings
    )
    named = tuple(map(str, paths))
    return assemble.lint_report(named, base, version("torch"), findings, errors)


def _near(fix: Suggestion | None, base: str) -> Suggestion | None:
    if fix is None or not fix.diff:
        return fix
    diff = fix.diff.replace(f"--- a/{base}/", "--- a/").replace(f"+++ b/{base}/", "+++ b/")
    return replace(fix, diff=diff)


undo, settle = undo_sources, settle_killed  # their names in the Python API


class Watch:
    """Watch of the files that torchtrim writes around a path, even if its run then fails."""

    def __init__(self, start: Path) -> None:
        self._start = start
        self._before = self._last()[0]

    def written(self) -> tuple[Path, ...]:
        """Return the files of the last write since the start, empty if it was undone."""
        key, paths = self._last()
        return paths if key != self._before else ()

    def _last(self) -> tuple[str, tuple[Path, ...]]:
        with contextlib.suppress(TorchtrimError):
            project = holder_of(self._start)
            write = last_write(project) if project is not None else None
            if project is not None and write is not None:
                return write.key, tuple(project / one.path for one in write.files)
        return "", ()
