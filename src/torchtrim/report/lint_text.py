"""Renders lint findings as text: one line each, or with source lines and the fix's diff."""

from __future__ import annotations

from collections.abc import Iterator

from torchtrim.records import Finding, Report
from torchtrim.report.located import excerpt
from torchtrim.report.safe import clean


def concise(report: Report, encoding: str = "utf-8") -> str:
    """Return `path:line: CODE message` for each finding, with `[*]` for a safe fix, `[?]` for an unsafe
    one."""
    return "".join(f"{clean(_line(found), encoding)}\n" for found in report.findings)


def full(report: Report, encoding: str = "utf-8") -> str:
    """Return each finding with its source lines, and its fix as a diff or the reason for having none."""
    lines = [line for found in report.findings for line in _block(report, found)]
    return "".join(f"{clean(line, encoding)}\n" for line in lines)


def mark(finding: Finding) -> str:
    """Return `"[*] "` for a safe fix, `"[?] "` for an unsafe one, else `""`."""
    fix = finding.fix
    if fix is None or fix.kind != "code":
        return ""
    return "[?] " if fix.reason.startswith("unsafe") else "[*] "


def _line(finding: Finding) -> str:
    return f"{finding.path}:{finding.line}: {finding.code} {mark(finding)}{finding.message}"


def _block(report: Report, finding: Finding) -> Iterator[str]:
    yield _line(finding)
    path = finding.path if finding.path.startswith("/") else f"{report.project}/{finding.path}"
    for line in excerpt(path, finding.line, finding.end_line):
        yield f"{line.number:>6} {'>' if line.hot else '|'} {line.text}"
    fix = finding.fix
    if fix is not None:
        kind = {"code": "fix", "advice": "instead", "refused": "no fix"}.get(fix.kind, fix.kind)
        yield f"       {kind}: {fix.reason}"
        changes = (fix.diff or "").splitlines()
        yield from (f"       {c.rstrip()}" for c in changes if not c.startswith(("---", "+++")))
    yield ""
