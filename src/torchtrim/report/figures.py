"""A report's figures as rows of a table: measured, predicted, and measured again."""

from __future__ import annotations

from dataclasses import dataclass

from torchtrim.core.units import format_bytes, format_seconds
from torchtrim.records import Report
from torchtrim.report.facts import PEAKS, peak_after, peak_before, step_name


@dataclass(frozen=True, kw_only=True)
class FigureRow:
    """A cell for each head. `kind`: of memory, if it is one; `bar`: its bytes before and after."""

    name: str
    cells: tuple[str, ...]
    kind: str = ""
    bar: tuple[int, int] = (0, 0)


def figure_rows(report: Report) -> tuple[tuple[str, ...], tuple[FigureRow, ...]]:
    """The heads of the columns that are known, and the rows: peak, step, the kinds at the peak."""
    known = {
        "original": report.original is not None,
        "predicted": report.plan is not None,
        "planned": report.planned is not None,
    }
    heads = tuple(head for head, has in known.items() if has)
    return heads, (*_peak_rows(report, heads), *_kind_rows(report, heads))


def _peak_rows(report: Report, heads: tuple[str, ...]) -> list[FigureRow]:
    predicted = report.plan.predicted if report.plan else None
    measured = peak_after(report) if report.planned else None
    peaks = {
        "original": peak_before(report),
        "predicted": predicted.peak_bytes if predicted else None,
        "planned": measured,
    }
    steps = {
        "original": report.original.step_seconds if report.original else None,
        "predicted": predicted.step_seconds if predicted else None,
        "planned": report.planned.step_seconds if report.planned else None,
    }
    rows = [FigureRow(name=PEAKS[report.memory_kind], cells=tuple(_bytes(peaks[h]) for h in heads))]
    if any(steps.values()):
        cells = tuple(_seconds(steps[h]) for h in heads)
        rows.append(FigureRow(name=step_name(report), cells=cells))
    return rows


def _kind_rows(report: Report, heads: tuple[str, ...]) -> list[FigureRow]:
    before = report.original.by_kind if report.original else {}
    after = report.planned.by_kind if report.planned else {}
    rows = []
    for kind in sorted({*before, *after}, key=lambda k: (-before.get(k, after.get(k, 0)), k)):
        bar = before.get(kind, 0), after.get(kind, 0)
        shown = {"original": before.get(kind), "planned": after.get(kind)}
        cells = tuple(_bytes(shown.get(head)) for head in heads)
        if any(bar):
            lone = bar if report.planned else (bar[0], bar[0])
            rows.append(FigureRow(name=kind.replace("_", " "), cells=cells, kind=kind, bar=lone))
    return rows


def _bytes(value: int | None) -> str:
    return "" if value is None else format_bytes(value)


def _seconds(value: float | None) -> str:
    return "" if value is None else format_seconds(value)
