"""Renders a report as Markdown for a pull request or a job summary."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from torchtrim.records import Report
from torchtrim.report import facts
from torchtrim.report.blocks import Column, TextTable, escape, markdown_items
from torchtrim.report.headline import headline
from torchtrim.report.located import LocatedFinding, locate_findings
from torchtrim.report.sections import figure_rows, sentences

MOST_BYTES = 60_000
"""GitHub limits a comment to 65,536 characters."""

_MOST_FINDINGS = 100  # Arbitrary; more would hide the rest of the comment.
_MOST_KINDS = 8  # All kinds of memory that profiles have.
_MOST_LINES = 5  # Arbitrary; sections stay short, and the report has all lines.
_FIRST = ("fits with", "smallest is", "levers", "plan", "certificate")
_LAST = ("ranks", "estimate", "waits", "fixes", "places", "note")
_FINDINGS = (
    Column(head="code"),
    Column(head="place"),
    Column(head="a step", right=True),
    Column(head="price", right=True),
    Column(head="what"),
)


def render(report: Report, *, root: str = "", **_: object) -> str:
    """Return the report in at most `MOST_BYTES` bytes, with a count of the omitted findings.

    Paths are relative to `root`, by default the project.
    """
    found = locate_findings(report, root)
    shown = min(len(found), _MOST_FINDINGS)
    text = _page(report, found, shown)
    while shown and len(text.encode()) > MOST_BYTES:
        shown //= 2
        text = _page(report, found, shown)
    return text


def _page(report: Report, found: Sequence[LocatedFinding], shown: int) -> str:
    head, items = headline(report), sentences(report)
    origin = f"torchtrim {report.torchtrim} {report.verb}, torch {report.torch}, {report.device}"
    blocks = [
        f"## torchtrim: {escape(head.word)}",
        "\n".join(f"* {escape(part)}" for part in head.parts),
        *(markdown_items(items[label], _MOST_LINES) for label in _FIRST),
        _figures(report),
        _findings(report, found, shown),
        *(markdown_items(items[label], _MOST_LINES) for label in _LAST),
        f"<sub>{escape(origin)}</sub>",
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _figures(report: Report) -> str:
    heads, rows = figure_rows(report)
    if not heads:
        return ""
    kinds = [row for row in rows if row.kind]
    shown = [row for row in rows if not row.kind] + kinds[:_MOST_KINDS]
    columns = [Column(), *(Column(head=head, right=True) for head in heads)]
    return TextTable(columns, [(row.name, *row.cells) for row in shown]).markdown()


def _findings(report: Report, found: Sequence[LocatedFinding], shown: int) -> str:
    if not found:
        return ""
    title = f"### {facts.count_of(report.findings)}: {escape(facts.families(report.findings))}"
    left = len(found) - shown
    rest = f"and {left} more, in the report of the run." if left else ""
    return f"{title}\n\n{TextTable(_FINDINGS, [*map(_finding, found[:shown])]).markdown(rest)}"


def _finding(found: LocatedFinding) -> tuple[str, ...]:
    finding = found.finding
    allowed = f" ({found.allowed} allowed)" if found.allowed else ""
    return (
        finding.code,
        Markup(f"<code>{escape(found.where)}</code>") if found.where else "",
        f"{finding.count_per_step}{allowed}",
        facts.price(finding),
        found.text,
    )
