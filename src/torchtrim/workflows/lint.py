"""Reads source, finds host-device syncs, and edits it where that is asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import msgspec

from torchtrim.linter.cached import lint_cached
from torchtrim.linter.files import (
    FixedFiles,
    Linted,
    Selected,
    files_of,
    fix_files,
    lint_files,
    project_of,
    relative,
    write_fixed,
)
from torchtrim.records.finding import Suggestion
from torchtrim.records.report import Report
from torchtrim.report import assemble
from torchtrim.workflows.undo import settle


class Checked(NamedTuple):
    """What reading gave: the report, the files that could not be read, and the edits; None for not asked."""

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
    """The findings of files and folders, by paths relative to the current one.

    `cached`: what was found in files that have not changed since is not looked for again. `fix`: apply the
    fixes that are safe without a run, with `unsafe` also others; `write` them.
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
        msgspec.structs.replace(found, path=relative(found.path, base), fix=_near(found.fix, base))
        for one in linted
        for found in one.findings
    )
    named = tuple(map(str, paths))
    return assemble.lint_report(named, base, version("torch"), findings, errors)


def _near(fix: Suggestion | None, base: str) -> Suggestion | None:
    if fix is None or not fix.diff:
        return fix
    diff = fix.diff.replace(f"--- a/{base}/", "--- a/").replace(f"+++ b/{base}/", "+++ b/")
    return msgspec.structs.replace(fix, diff=diff)
