"""What an estimate says, in lines that every form of a report has."""

from __future__ import annotations

from torchtrim.records.estimate import Growth
from torchtrim.records.report import Report
from torchtrim.report.facts import runs
from torchtrim.units import format_bytes


def estimate_lines(report: Report) -> list[str]:
    """What an estimate knows to the byte, what would free memory, and how far the batch can grow."""
    found = report.estimated
    if found is None:
        return []
    exact = (
        ("parameters", found.parameter_bytes),
        ("gradients", found.gradient_bytes),
        ("optimizer state", found.optimizer_bytes),
    )
    lines = [", ".join(f"{name} {format_bytes(size)}" for name, size in exact if size)]
    if found.recomputed_bytes is not None:
        places = ", ".join(runs(found.recomputed))
        lines.append(
            f"recomputed, it is predicted to need {format_bytes(found.recomputed_bytes)}: {places}"
        )
    return [line for line in (*lines, *map(_growth_line, found.growth)) if line]


def _growth_line(growth: Growth) -> str:
    """`"largest batch in 24 GiB: 96 (23.8 GiB; 97 needs 24.1 GiB), now 8"`."""
    known = growth.peak_bytes is not None
    parts = [format_bytes(growth.peak_bytes)] if growth.peak_bytes is not None else []
    if growth.next_bytes is not None:
        needs = format_bytes(growth.next_bytes)
        close = needs == format_bytes(growth.budget_bytes)
        over = f"{format_bytes(growth.next_bytes - growth.budget_bytes)} more"
        parts.append(f"{growth.largest + 1} needs {over if close else needs}")
    elif growth.limited_by:
        parts.append(f"{growth.largest + 1} does not run: {growth.limited_by}")
    told = f"{growth.largest if known else 'none fits'} ({'; '.join(parts)})"
    line = f"largest {growth.what} in {format_bytes(growth.budget_bytes)}: {told}, now {growth.now}"
    if growth.falls:
        line += f"; memory falls somewhere up to {growth.tried}, so a longer one may fit too"
    return line
