"""Fixes the host-device syncs of a script, and what a report says of the fixes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from torchtrim.analysis.syncs import CODES
from torchtrim.records.finding import Finding, Suggestion
from torchtrim.records.fix import Fixes, FixRecord
from torchtrim.records.report import Report, Result
from torchtrim.records.trial import Request, Trial
from torchtrim.report.assemble import with_planned
from torchtrim.rewriter.edits import diff_of
from torchtrim.rewriter.files import write_sources
from torchtrim.runner.script import Script
from torchtrim.runner.trials import Progress
from torchtrim.workflows.findings import report_of
from torchtrim.workflows.fix.attempt import waiting_lines
from torchtrim.workflows.fix.rounds import Fixed, Fixing
from torchtrim.workflows.undo import settle

_RANK = {"applied": 0, "suggested": 1, "refused": 2, "reverted": 3}


def fix_report(
    script: Script,
    request: Request,
    *,
    unsafe: bool = False,
    write: bool = False,
    ready: Callable[[str], object] = lambda _: None,
    progress: Progress = lambda _: None,
) -> Result:
    """The fixes of the host-device syncs in a script's own source, each proved.

    With `write` they are in the files afterwards, else only in the report's diff; before any file is
    written `ready` gets the diff. `unsafe`: apply also those that rest on what no run has shown.
    """
    settle(script.path or Path.cwd())
    fixed = Fixing(script, request, progress, unsafe=unsafe).fix()
    fixes = fixes_of(fixed, script.project, written=write and bool(fixed.texts))
    if fixes.written:
        ready(fixes.diff)
        write_sources(fixed.texts, fixed.before, script.project)
    report = report_of("optimize", script, fixed.original)
    report = with_planned(report, fixed.planned, fixes.certificate)
    after = fixed.planned.profile if fixed.planned else None
    return Result(with_fixes(report, fixes), fixed.original.profile, after)


def fixes_of(fixed: Fixed, project: Path, *, written: bool = False) -> Fixes:
    """The fixes, with the diff of all that were applied."""
    diff = "".join(
        diff_of(_relative(path, project), fixed.before[path], text)
        for path, text in sorted(fixed.texts.items())
    )
    return Fixes(
        places=tuple(_told(fixed.records)),
        syncs_before=_waits(fixed.original, project),
        syncs_after=_waits(fixed.planned or fixed.original, project),
        diff=diff,
        written=written,
        certificate=fixed.certificate,
    )


def _told(records: Sequence[FixRecord]) -> Iterator[FixRecord]:
    """The records without refusals of a line that another fix has freed of its syncs."""
    fixed_lines = {
        (one.path, one.line) for one in records if one.state == "applied" and not one.syncs_after
    }
    for record in records:
        if record.state != "refused" or (record.path, record.line) not in fixed_lines:
            yield record


def with_fixes(report: Report, fixes: Fixes) -> Report:
    """The report with the fixes, and with what became of each at its finding."""
    by_line: dict[tuple[str, int], list[FixRecord]] = {}
    for record in sorted(fixes.places, key=lambda one: _RANK[one.state]):
        by_line.setdefault((record.path, record.line), []).append(record)
    findings = tuple(
        _with_fix(finding, by_line.get((finding.path, finding.line), []))
        for finding in report.findings
    )
    return msgspec.structs.replace(report, findings=findings, fixes=fixes)


def _with_fix(finding: Finding, records: list[FixRecord]) -> Finding:
    if not records or finding.code not in CODES:
        return finding
    first = records[0]
    reason = f"{first.name}: {first.reason}" if first.reason else first.name
    fix = Suggestion(
        kind="code" if first.state in ("applied", "suggested") else "refused",
        equivalence=first.equivalence,
        diff=first.diff or None,
        reason=reason if first.state != "suggested" else f"unsafe, {reason}",
    )
    return msgspec.structs.replace(finding, fix=fix)


def _waits(trial: Trial, project: Path) -> int:
    return sum(waiting_lines(trial.profile, project).values()) if trial.profile else 0


def _relative(path: str, project: Path) -> str:
    return str(Path(path).relative_to(project)) if Path(path).is_relative_to(project) else path
