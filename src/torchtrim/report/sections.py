"""The tables of a report on a terminal: figures, holders, findings, frontier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from torchtrim.core.units import format_bytes, format_seconds
from torchtrim.records import Finding, Report
from torchtrim.report import facts
from torchtrim.report.figures import Row, figure_rows
from torchtrim.report.safe import clean, keep_left, keep_right, sentence

NARROW = 60


@dataclass(frozen=True, kw_only=True)
class Room:
    """How many rows a section may take, lines a sentence, and if blank lines part the sections."""

    kinds: int
    holders: int
    findings: int
    notes: int
    fixes: int = 3
    text: int = 1
    gaps: bool = False


@dataclass(frozen=True, kw_only=True)
class Page:
    """What lines are written on."""

    report: Report
    width: int
    encoding: str
    fancy: bool

    def say(self, text: str) -> str:
        """`text`, harmless and writable here."""
        return clean(text, self.encoding)

    def place(self, path: str, line: int) -> str:
        """`path:line`, short."""
        return self.say(facts.place(path, line, facts.home(self.report)))


def evidence(page: Page, room: Room) -> list[Text]:
    """Measured and predicted figures, and the kinds of memory at the peak with bars."""
    heads, rows = figure_rows(page.report)
    if not heads:
        return []
    wide = page.width >= NARROW
    label, column = (18, 11) if wide else (page.width - 10 * len(heads), 10)
    bars = min(page.width - label - column * len(heads) - 2, 40) if wide else 0
    legend = "  at the peak" + (" (. saved)" if page.report.planned else ", by kind")
    line = Text(" " * label + "".join(head.rjust(column) for head in heads), "bold")
    line.append(legend if bars >= len(legend) else "", "dim")
    figures = [row for row in rows if not row.kind]
    kinds = [row for row in rows if row.kind][: room.kinds]
    longest = max((max(row.bar) for row in kinds), default=0)
    return [line] + [
        _evidence_row(page, row, label, column, bars * (max(row.bar) / longest if longest else 0))
        for row in (*figures, *kinds)
    ]


def _evidence_row(page: Page, row: Row, label: int, column: int, length: float) -> Text:
    name = keep_left(page.say(row.name), label)
    line = Text(name + " " * (label - cell_len(name)))
    for cell in row.cells:
        line.append(cell.rjust(column))
    if row.kind and length:
        before, after = row.bar
        kept = round(length * min(before, after) / max(before, after))
        rest = round(length) - kept
        line.append("  " + ("█" if page.fancy else "#") * kept, "cyan")
        line.append(("." if after < before else "+") * rest, "dim" if after < before else "red")
    line.rstrip()
    return line


def _more(title: str, total: int, shown: int) -> Text:
    line = Text(title, "bold")
    return line.append(f" (top {shown}, +{total - shown} more)", "dim") if total > shown else line


def _widest(cells: Sequence[str], most: int) -> int:
    return min(max(map(cell_len, cells), default=0), most)


def _padded(text: str, width: int) -> str:
    return text + " " * max(0, width - cell_len(text))


def holders(page: Page, room: Room) -> list[Text]:
    """What is live at the peak: bytes, module, place, why."""
    shown = page.report.holders[: room.holders]
    if not shown:
        return []
    share = (page.width - 12) // 3 if page.width >= NARROW else (page.width - 14) // 2
    modules = [keep_right(page.say(h.module or h.kind), share) for h in shown]
    places = [keep_right(page.place(h.path, h.line) or "-", share) for h in shown]
    widths = _widest(modules, share), _widest(places, share)
    lines = [_more("live at the peak", len(page.report.holders), len(shown))]
    for holder, module, where in zip(shown, modules, places, strict=True):
        line = Text(format_bytes(holder.bytes).rjust(10))
        line.append("  " + _padded(module, widths[0]) + "  ").append(where, "cyan")
        room_left = page.width - 14 - sum(widths)
        if room_left >= 12:
            line.append(" " * (widths[1] - cell_len(where)))
            line.append("  " + keep_left(page.say(holder.why or holder.kind), room_left - 2), "dim")
        line.rstrip()
        lines.append(line)
    return lines


def findings(page: Page, room: Room) -> list[Text]:
    """Counts, then a line for each finding: code, place, message, price."""
    report = page.report
    if not report.findings:
        return []
    shown = report.findings[: room.findings]
    most = page.width // 4 if page.width >= NARROW else page.width - 19
    places = [keep_right(page.place(f.path, f.line), most) for f in shown]
    column = _widest(places, most)
    title = _more(facts.count_of(report.findings), len(report.findings), len(shown))
    room_left = page.width - title.cell_len - 2
    lines = [title.append(": " + keep_left(facts.families(report.findings), room_left))]
    for finding, where in zip(shown, places, strict=True):
        lines += _finding(page, finding, _padded(where, column), room)
    return lines


def _finding(page: Page, finding: Finding, where: str, room: Room) -> list[Text]:
    line = Text("  ").append(keep_left(page.say(finding.code), 6), "bold yellow")
    line.append("  " + where + "  ", "cyan")
    price, message = facts.price(finding), page.say(finding.message)
    if page.width < NARROW:
        line.append(price if line.cell_len + len(price) <= page.width else "").rstrip()
        return [line, Text("    " + keep_left(message, page.width - 4))]
    indent = line.cell_len
    room_left = page.width - indent - (len(price) + 2 if price else 0)
    first, *rest = sentence(message, room_left, min(room.text, 2)) or [""]
    line.append(_padded(first, room_left) + "  " + price).rstrip()
    return [line, *(Text(" " * indent + text) for text in rest)]


def frontier(page: Page, room: Room) -> list[Text]:
    """What plans for other budgets are predicted to need."""
    points = page.report.frontier
    hand = tuple(point for point in points if point.by_hand)
    shown = (*points[: min(room.findings, len(points) - len(hand))], *hand)
    title = _more("other budgets", len(points), len(shown))
    lines = [title.append(keep_left(": budget, peak, step, places", page.width - title.cell_len))]
    for point in shown:
        cells = (format_bytes(point.budget_bytes), format_bytes(point.peak_bytes))
        time = format_seconds(point.step_seconds)
        columns = "".join(cell.rjust(10) for cell in (*cells, time))
        where = point.by_hand or ", ".join(facts.runs(point.where)) or "as it is"
        lines.append(Text(columns + "  ").append(keep_left(page.say(where), page.width - 32)))
    return lines if shown else []
