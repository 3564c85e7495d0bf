"""Renders a gate for a terminal: exceeded limits and their places, allowed findings, unneeded entries."""

from __future__ import annotations

from collections.abc import Sequence

from torchtrim.analysis.allow_list import near
from torchtrim.core.units import counted
from torchtrim.records import Finding, Report
from torchtrim.records.allow import AllowedFinding, PassedLimit
from torchtrim.report.blocks import first
from torchtrim.report.facts import place, price
from torchtrim.report.safe import at_most, clean

_MOST = 8  # Arbitrary; with the report above, the gate still fits a screen.
_MOST_CHARACTERS = 200  # Arbitrary; logs of CI have no width to ask for.


def render(
    report: Report, over: Sequence[PassedLimit], allow_list: str, encoding: str = "utf-8"
) -> str:
    """Return the exceeded limits, then a line on the findings that `allow_list` covers, or an empty
    string."""
    lines: list[str] = []
    for passed in over:
        lines.append(f"OVER THE LIMIT  {passed.limit}")
        lines += first(
            (_site(report, found) for found in passed.findings), _MOST, "  and {} more, in --json"
        )
    unneeded = [entry for entry in report.allowed if not entry.used]
    used = [entry for entry in report.allowed if entry.used]
    if used:
        count = sum(entry.used for entry in used)
        places = counted(len({(entry.path, entry.line) for entry in used}), "place")
        lines.append(f"allowed by {allow_list}: {count} a step at {places}")
    if unneeded:
        lines.append(f"no longer needed in {allow_list}, delete these entries:")
        lines += first(map(_entry, unneeded), _MOST, "  and {} more, in --json")
    return "".join(f"{at_most(clean(line, encoding), _MOST_CHARACTERS)}\n" for line in lines)


def _site(report: Report, found: Finding) -> str:
    where = place(near(found.path, report.project), found.line)
    parts = (f"{found.count_per_step} a step", price(found))
    return f"  {found.code}  {where}  {', '.join(part for part in parts if part)}"


def _entry(entry: AllowedFinding) -> str:
    where = f"{entry.path} {entry.function}".rstrip()
    return f"  {entry.code}  {where}  {entry.line_text}".rstrip()
