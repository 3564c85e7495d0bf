"""The title of the page: the answer in a few words, and the other sentences of the headline below it."""

from __future__ import annotations

from dataclasses import dataclass

from torchtrim.core.units import counted, format_bytes
from torchtrim.records import Report
from torchtrim.records.fix import Fixes
from torchtrim.report import facts
from torchtrim.report.headline import headline

_EQUAL = {
    "results identical bit for bit": "bit-identical",
    "results equal up to rounding": "equal up to rounding",
    "results of a different function": "of a different function",
}
_LEADS = ("Fits", "Predicted to fit")


@dataclass(frozen=True)
class PageTitle:
    """A short first line, and the lines in grey below it."""

    first: str
    others: tuple[str, ...]


def page_title(report: Report) -> PageTitle:
    """Return the title, such as `"Fits: 89.8 -> 53.8 MiB, bit-identical"`."""
    first, *others = headline(report).word.split("; ")
    lead, _, claims = first.partition(": ")
    before, after = facts.peak_before(report), facts.peak_after(report)
    if lead in _LEADS and before is not None and after is not None:
        equal = next((short for long, short in _EQUAL.items() if long in claims), "")
        parts = (f"{lead}: {sizes(before, after)}", equal)
        first = ", ".join(part for part in parts if part)
    elif report.floor_bytes is not None:
        least = format_bytes(report.floor_bytes)
        first = f"{first.partition(': ')[0]}: the least is {least}"
    elif facts.is_idle(report) and before is not None:
        first = f"Fits already: {format_bytes(before)}"
    elif report.fixes is not None and report.fixes.diff and report.budget_bytes is None:
        first = _syncs(report.fixes)
    waiting = unwritten(report)
    return PageTitle(first, (*others, *([waiting] if waiting else [])))


def _syncs(fixes: Fixes) -> str:
    count = counted(sum(one.state == "applied" for one in fixes.places), "fix", "fixes")
    state = f"{count} written" if fixes.written else f"{count} to write"
    return f"Syncs {fixes.syncs_before} -> {fixes.syncs_after} a step: {state}"


def sizes(before: int, after: int) -> str:
    """Return two sizes with their unit once, if they share it: `"89.8 -> 53.8 MiB"`."""
    left, right = format_bytes(before), format_bytes(after)
    number, _, unit = left.partition(" ")
    return f"{number if right.endswith(f' {unit}') else left} -> {right}"


def unwritten(report: Report) -> str:
    """Return the effect of fixes that are suggested beside a plan and not yet written, or an empty string."""
    fixes = report.fixes
    if fixes is None or fixes.written or not fixes.diff or report.budget_bytes is None:
        return ""
    count = counted(sum(one.state == "applied" for one in fixes.places), "fix", "fixes")
    return (
        f"{count} suggested, not written: syncs {fixes.syncs_before} -> {fixes.syncs_after} a step"
    )
