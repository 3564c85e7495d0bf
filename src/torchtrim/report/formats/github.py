"""Renders a report as workflow commands, which GitHub Actions shows beside the lines they name."""

from __future__ import annotations

from torchtrim.records import Report
from torchtrim.report.facts import tone_of
from torchtrim.report.headline import headline
from torchtrim.report.located import LocatedFinding, inside, locate_findings, rule_name
from torchtrim.report.safe import clean


def render(report: Report, *, root: str = "", **_: object) -> str:
    """Return a line for a bad or unsure verdict, then one for each finding, most expensive first.

    Paths are relative to `root`, by default the project; GitHub expects the repository's folder. Findings
    on the allow-list are notices, the others warnings. GitHub shows ten of each per workflow step.
    """
    lines = [*_verdict(report, root), *(_finding(found) for found in locate_findings(report, root))]
    return "".join(f"{line}\n" for line in lines)


def _verdict(report: Report, root: str) -> list[str]:
    head = headline(report)
    if head.tone not in ("bad", "unsure"):
        return []
    level = "error" if head.tone == "bad" else "warning"
    title = {"title": f"torchtrim: {head.word}"}
    return [command(level, ", ".join(head.parts), **_difference(report, root), **title)]


def _difference(report: Report, root: str) -> dict[str, str]:
    certificate = report.certificate
    first = certificate.first_difference if certificate else None
    if certificate is None or first is None or tone_of(certificate) != "bad":
        return {}
    path = inside(first.path, root or report.project)
    return {"file": path, "line": str(first.line)} if path and first.line > 0 else {}


def _finding(found: LocatedFinding) -> str:
    name = rule_name(found.finding.code)
    properties = {"title": f"{found.finding.code} {name}".rstrip()}
    if found.path:
        lines = {"line": str(found.line), "endLine": str(found.end_line)} if found.line else {}
        properties = {"file": found.path, **lines, **properties}
    text = "\n".join(part for part in (found.message, found.facts, found.advice) if part)
    return command("notice" if found.covered else "warning", text, **properties)


def command(name: str, message: str, **properties: str) -> str:
    """Return `::warning file=a.py,line=3::message`, on one line for any values."""
    given = ",".join(f"{key}={escape_property(value)}" for key, value in properties.items())
    return f"::{name}{' ' if given else ''}{given}::{escape_message(message)}"


def escape_message(text: str) -> str:
    """Escape text for a command's message: keep line breaks, drop other control characters."""
    lines = (clean(line).replace("%", "%25") for line in text.split("\n"))
    return "%0A".join(lines)


def escape_property(text: str) -> str:
    """Escape text for the value of a command's property."""
    return clean(text).replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
