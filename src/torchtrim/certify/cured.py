"""What a report says of the cures of a script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from torchtrim.certify.attempt import waiting_lines
from torchtrim.certify.fixing import Fixed
from torchtrim.certify.trial import Trial
from torchtrim.records.finding import Cure, Finding
from torchtrim.records.fix import Cures, FixRecord
from torchtrim.records.report import Report
from torchtrim.rewrite.edits import diff_of
from torchtrim.rules.waits import CODES

_RANK = {"made": 0, "offered": 1, "refused": 2, "taken back": 3}


def cures_of(fixed: Fixed, project: Path, *, written: bool = False) -> Cures:
    """The cures, with the diff of all that were made."""
    diff = "".join(
        diff_of(_relative(path, project), fixed.before[path], text)
        for path, text in sorted(fixed.texts.items())
    )
    return Cures(
        fixes=tuple(_told(fixed.records)),
        waits_before=_waits(fixed.original, project),
        waits_after=_waits(fixed.planned or fixed.original, project),
        diff=diff,
        written=written,
        certificate=fixed.certificate,
    )


def _told(records: Sequence[FixRecord]) -> Iterator[FixRecord]:
    """The records without refusals of a line that another cure has mended."""
    mended = {
        (one.path, one.line) for one in records if one.state == "made" and not one.waits_after
    }
    for record in records:
        if record.state != "refused" or (record.path, record.line) not in mended:
            yield record


def with_cures(report: Report, cures: Cures) -> Report:
    """The report with the cures, and with what became of each at its finding."""
    by_line: dict[tuple[str, int], list[FixRecord]] = {}
    for record in sorted(cures.fixes, key=lambda one: _RANK[one.state]):
        by_line.setdefault((record.path, record.line), []).append(record)
    findings = tuple(
        _cured(finding, by_line.get((finding.path, finding.line), []))
        for finding in report.findings
    )
    return msgspec.structs.replace(report, findings=findings, cures=cures)


def _cured(finding: Finding, records: list[FixRecord]) -> Finding:
    if not records or finding.code not in CODES:
        return finding
    first = records[0]
    reason = f"{first.cure}: {first.reason}" if first.reason else first.cure
    cure = Cure(
        kind="code" if first.state in ("made", "offered") else "refused",
        equivalence=first.equivalence,
        diff=first.diff or None,
        reason=reason if first.state != "offered" else f"unsafe, {reason}",
    )
    return msgspec.structs.replace(finding, cure=cure)


def _waits(trial: Trial, project: Path) -> int:
    return sum(waiting_lines(trial.profile, project).values()) if trial.profile else 0


def _relative(path: str, project: Path) -> str:
    return str(Path(path).relative_to(project)) if Path(path).is_relative_to(project) else path
