"""What a gate says on a terminal: limits that are passed and where, allowed findings, unneeded entries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchtrim.analysis.allow_list import near
from torchtrim.records import Finding, Report
from torchtrim.records.allow import Allowed, Over
from torchtrim.report.facts import place, price
from torchtrim.report.safe import clean, keep_left

_MOST = 8
_WIDTH = 100


def render(report: Report, over: Sequence[Over], allow_list: str, encoding: str = "utf-8") -> str:
    """The limits that are passed, then a line on what `allow_list` covers; empty where there is none."""
    lines: list[str] = []
    for passed in over:
        lines.append(f"OVER THE LIMIT  {passed.limit}")
        lines += _most([_site(report, found) for found in passed.findings])
    unneeded = [entry for entry in report.allowed if not entry.used]
    used = [entry for entry in report.allowed if entry.used]
    if used:
        lines.append(f"allowed by {allow_list}: {_sum(used)}")
    if unneeded:
        lines.append(f"no longer needed in {allow_list}, delete these entries:")
        lines += _most(map(_entry, unneeded))
    return "".join(f"{keep_left(clean(line, encoding), _WIDTH)}\n" for line in lines)


def _sum(used: Sequence[Allowed]) -> str:
    count = sum(entry.used for entry in used)
    places = len({(entry.path, entry.line) for entry in used})
    return f"{count} a step at {places} place{'' if places == 1 else 's'}"


def _site(report: Report, found: Finding) -> str:
    where = place(near(found.path, report.project), found.line)
    parts = (f"{found.count_per_step} a step", price(found))
    return f"  {found.code}  {where}  {', '.join(part for part in parts if part)}"


def _entry(entry: Allowed) -> str:
    where = f"{entry.path} {entry.function}".rstrip()
    return f"  {entry.code}  {where}  {entry.line_text}".rstrip()


def _most(lines: Iterable[str]) -> list[str]:
    every = list(lines)
    rest = [f"  and {len(every) - _MOST} more"] if len(every) > _MOST else []
    return [*every[:_MOST], *rest]
