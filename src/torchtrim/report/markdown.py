"""A report as Markdown for a pull request or a job's summary: verdict, figures, findings, plan, proof."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torchtrim.records import Report
from torchtrim.report import estimates, facts
from torchtrim.report.figures import figure_rows
from torchtrim.report.headline import headline
from torchtrim.report.located import Located, located
from torchtrim.report.ranks import rank_lines
from torchtrim.report.safe import clean

MOST_BYTES = 60_000
"""GitHub takes 65,536 characters as a comment."""

_MOST_FINDINGS = 100
_MOST_KINDS = 8
_MOST_LINES = 5
_MOST_CHARACTERS = 300
_SPECIAL = re.compile(
    r"(?P<mark>[&<>\\`*_\[\]|~$])|(?P<reference>[@#](?=\w)|:(?=//)|(?<=www)\.)", re.IGNORECASE
)


def render(report: Report, *, root: str = "") -> str:
    """The report in at most `MOST_BYTES` bytes; findings that had to be left out are counted.

    Paths are relative to `root`, by default the project.
    """
    found = located(report, root)
    shown = min(len(found), _MOST_FINDINGS)
    text = _page(report, found, shown)
    while shown and len(text.encode()) > MOST_BYTES:
        shown //= 2
        text = _page(report, found, shown)
    return text


def _page(report: Report, found: Sequence[Located], shown: int) -> str:
    head = headline(report)
    blocks = [
        f"## torchtrim: {escape(head.word)}",
        "\n".join(f"* {escape(part)}" for part in head.parts),
        _lines("What the smallest peak is made of", facts.part_lines(report)),
        _lines("What each lever would reach", facts.lever_lines(report)),
        _figures(report),
        _findings(report, found, shown),
        _lines("Ranks", rank_lines(report)),
        _lines("Estimate", estimates.estimate_lines(report)),
        _lines("Waits", facts.waiting_lines(report)),
        _lines("Fixes", facts.fix_lines(report)),
        _lines("Plan", facts.plan_lines(report)),
        _lines(
            "Certificate", facts.certificate_lines(report.certificate) if report.certificate else ()
        ),
        _lines("Notes", report.notes),
        f"<sub>{escape(_origin(report))}</sub>",
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _figures(report: Report) -> str:
    heads, rows = figure_rows(report)
    if not heads:
        return ""
    kinds = [row for row in rows if row.kind]
    shown = [row for row in rows if not row.kind] + kinds[:_MOST_KINDS]
    lines = [_row("", *heads), "|---|" + "--:|" * len(heads)]
    return "\n".join([*lines, *(_row(escape(row.name), *row.cells) for row in shown)])


def _findings(report: Report, found: Sequence[Located], shown: int) -> str:
    if not found:
        return ""
    title = f"### {facts.count_of(report.findings)}: {escape(facts.families(report.findings))}"
    lines = [title, "", _row("code", "place", "a step", "price", "what"), "|---|---|--:|--:|---|"]
    lines += map(_finding, found[:shown])
    if len(found) > shown:
        lines += ["", f"and {len(found) - shown} more, which the report of the run has."]
    return "\n".join(lines)


def _finding(found: Located) -> str:
    finding = found.finding
    allowed = f" ({found.allowed} allowed)" if found.allowed else ""
    return _row(
        escape(finding.code),
        f"<code>{escape(found.where)}</code>" if found.where else "",
        f"{finding.count_per_step}{allowed}",
        escape(facts.price(finding)),
        escape(found.text),
    )


def _lines(title: str, texts: Iterable[str]) -> str:
    every = list(texts)
    lines = [f"* {escape(text)}" for text in every[:_MOST_LINES]]
    if len(every) > _MOST_LINES:
        lines.append(f"* and {len(every) - _MOST_LINES} more")
    return "\n".join([f"**{title}**", "", *lines]) if lines else ""


def _origin(report: Report) -> str:
    return f"torchtrim {report.torchtrim} {report.verb}, torch {report.torch}, {report.device}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def escape(text: str) -> str:
    """Text that Markdown and GitHub leave alone: no markup, no mention, no reference, at most a line."""
    line = clean(text)
    cut = line if len(line) <= _MOST_CHARACTERS else line[: _MOST_CHARACTERS - 3] + "..."
    return _SPECIAL.sub(_harmless, cut)


def _harmless(match: re.Match[str]) -> str:
    """A mark as an entity; a reference with an invisible space, without which it would be a link."""
    reference = match.lastgroup == "reference"
    return f"{match[0]}&#8203;" if reference else f"&#{ord(match[0])};"
