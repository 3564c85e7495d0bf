"""Renders a report on a terminal: headline, evidence, findings, plan, and the next command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from torchtrim.core.units import format_bytes, format_seconds
from torchtrim.records import Finding, Report
from torchtrim.records.commands import from_here, shell_words
from torchtrim.report import facts
from torchtrim.report.blocks import (
    SCREEN,
    Column,
    Items,
    TextTable,
    first,
    labelled,
    padded,
    show,
)
from torchtrim.report.frontier import frontier_shown, on_device, way_of
from torchtrim.report.headline import headline
from torchtrim.report.holder_words import owner_of, reason_of
from torchtrim.report.safe import (
    clean,
    keep_left,
    keep_right,
    note_cut,
    noting_cuts,
    sentence,
    wrap,
)
from torchtrim.report.sections import FigureRow, figure_rows, sentences

Amount = Literal["headline", "screen", "all"]
_LABEL = 13  # The longest label and two blanks.
_NARROW = 60  # Arbitrary; narrower terminals have no room for text beside labels.
_BUDGETS = 6  # Arbitrary; a table of fewer rows shows no trend, and it is there on request only.
_STYLES = {"good": "bold green", "bad": "bold red", "unsure": "bold yellow", "neutral": "bold"}


@dataclass(frozen=True, kw_only=True)
class _RowLimits:
    """Limits on the rows of each section and the lines of a sentence; `gaps`: blank lines between them."""

    kinds: int
    holders: int
    findings: int
    notes: int
    fixes: int = 3
    text: int = 1
    gaps: bool = False


@dataclass(frozen=True, kw_only=True)
class _Page:
    report: Report
    width: int
    encoding: str
    fancy: bool
    items: Mapping[str, Items]

    @property
    def narrow(self) -> bool:
        return self.width < _NARROW

    @property
    def indent(self) -> int:
        return 6 if self.narrow else _LABEL

    def say(self, text: str) -> str:
        """Return `text` made harmless and writable on this terminal."""
        return clean(text, self.encoding)

    def place(self, path: str, line: int) -> str:
        return self.say(facts.place(path, line, facts.home(self.report)))


_FILE = 40  # Arbitrary; output into a file or a job's log is not bound to a screen.
_EVERY = 10_000  # Arbitrary; more than a report has of anything.
_ALL = _RowLimits(
    **dict.fromkeys(("kinds", "holders", "findings", "notes", "fixes", "text"), _EVERY), gaps=True
)
_ROOMS = (
    _RowLimits(kinds=7, holders=8, findings=12, notes=6, fixes=12, text=6, gaps=True),
    _RowLimits(kinds=5, holders=5, findings=8, notes=4, fixes=8, text=3, gaps=True),
    _RowLimits(kinds=5, holders=4, findings=8, notes=4, fixes=8, text=2),
    _RowLimits(kinds=4, holders=3, findings=6, notes=3, fixes=6, text=2),
    _RowLimits(kinds=3, holders=3, findings=5, notes=2, fixes=4),
    _RowLimits(kinds=3, holders=2, findings=5, notes=1, fixes=3),
    _RowLimits(kinds=2, holders=2, findings=4, notes=1),
    _RowLimits(kinds=2, holders=1, findings=3, notes=1),
    _RowLimits(kinds=1, holders=1, findings=2, notes=1),
    _RowLimits(kinds=1, holders=0, findings=1, notes=1),
    _RowLimits(kinds=0, holders=0, findings=1, notes=1),
    _RowLimits(kinds=0, holders=0, findings=1, notes=0, fixes=1),
)


def render(
    report: Report,
    console: Console,
    *,
    next_command: str | None,
    paths: Mapping[str, Path] = {},
    amount: Amount = "screen",
    whole: str = "--verbose",
) -> None:
    """Print the report within a screen if possible, or only its headline, or all of it.

    In a file, sentences are whole if they fit beside a few rows. `paths` maps kinds of output to the files
    written; `next_command` is the suggested next command; `whole` is where everything is that is cut or left
    out, beside the written report.
    """
    page = _Page(
        report=report,
        width=console.width,
        encoding=console.encoding,
        fancy=console.is_terminal and not console.options.ascii_only,
        items=sentences(report),
    )
    end = [*_written(page, paths), *_next(page, next_command)]
    places = [str(from_here(paths["report"]))] if "report" in paths else []
    rest = " or ".join([*places, *([whole] if amount != "all" else [])]) or "--json"
    if amount == "headline":
        lines = [*_verdict(page, _ROOMS[-1]), *_written(page, paths)]
    elif amount == "all":
        lines = _lines(page, _ALL, end, rest)
    else:
        uncut = [] if console.is_terminal else [replace(one, text=_EVERY) for one in _ROOMS]
        rooms = [*uncut, *_ROOMS]
        drawn = (_lines(page, room, end, rest) for room in rooms)
        most = max(console.height - 1, SCREEN) if console.is_terminal else _FILE
        fitting = (lines for lines in drawn if len(lines) <= most)
        lines = next(fitting, _lines(page, rooms[-1], end, rest))
    show(lines, console)


def _lines(page: _Page, room: _RowLimits, end: list[Text], rest: str) -> list[Text]:
    """Return the lines, and a last one that names `rest` if something was cut or left out."""
    with noting_cuts() as cuts:
        lines = _parts(page, room, end)
    return [*lines, *_labelled(page, "cut here", [f"whole in {rest}"], room)] if cuts else lines


def _parts(page: _Page, room: _RowLimits, end: list[Text]) -> list[Text]:
    """Return the answer, then the evidence. Files and the next command belong to a plan's answer."""
    evidence = (_evidence, _holders, _findings, _frontier, _fixes, _tail)
    answers = page.report.plan is not None
    parts = [_answer(page, room, end if answers else [])]
    parts += [section(page, room) for section in evidence]
    parts += [] if answers else [end]
    lines: list[Text] = []
    for number, part in enumerate(filter(None, parts)):
        lines += [Text(), *part] if number == 1 or (number and room.gaps) else part
    return lines


def _answer(page: _Page, room: _RowLimits, end: list[Text]) -> list[Text]:
    """Return the verdict, what meets a missed budget, the plan and its proof, the files, what to do next."""
    whole = replace(room, text=max(room.text, 3))
    return [
        *_verdict(page, room),
        *_missed(page, room),
        *_items(page, "plan", max(room.findings, 3), whole),
        *(_items(page, "places", _EVERY, room) if room is _ALL else ()),
        *_labelled(page, "certificate", _proof(page, room), whole),
        *end,
    ]


def _verdict(page: _Page, room: _RowLimits) -> list[Text]:
    head = headline(page.report)
    lines = [Text(line, _STYLES[head.tone]) for line in wrap(page.say(head.word), page.width)]
    most = max(room.text, 2)
    parts = (" ".join(sentence(page.say(part), page.width - 2, most)) for part in head.parts)
    figures = wrap(", ".join(parts), page.width - 2)
    return [*lines, *(Text(f"  {line}") for line in figures)]


def _missed(page: _Page, room: _RowLimits) -> list[Text]:
    whole = replace(room, text=max(room.text, 2))
    levers = _items(page, "levers", min(4, room.findings), whole) if room.notes else []
    return [
        *_items(page, "fits with", 3, whole),
        *_items(page, "smallest is", 1, whole if room.notes else room),
        *levers,
    ]


def _tail(page: _Page, room: _RowLimits) -> list[Text]:
    few = min(4, room.findings)
    return [
        *_items(page, "ranks", few, room),
        *_items(page, "estimate", few, room),
        *_items(page, "loader", room.findings, room),
        *_items(page, "waits", min(2, room.findings), room),
        *_items(page, "note", room.notes, room),
    ]


def _proof(page: _Page, room: _RowLimits) -> Sequence[str]:
    """Return the certificate. If the results are equal, only `--verbose` lists the counts."""
    certificate, lines = page.report.certificate, page.items["certificate"].texts
    equal = certificate is not None and certificate.verdict in ("BITWISE", "ROUNDING")
    return lines[:2] if equal and room is not _ALL else lines


def _fixes(page: _Page, room: _RowLimits) -> list[Text]:
    """Return the fixes and, beside no plan, the lines of their diff that fit; the file has the rest."""
    whole = replace(room, text=max(room.text, 2))
    fixes = _items(page, "fixes", 2 + max(room.fixes, 3 if room.notes else 1), whole)
    if not fixes or page.report.plan is not None:
        return fixes
    lines = [
        line for line in facts.diff_lines(page.report) if not line.startswith(("@@", "+++", "---"))
    ]
    shown = lines[: 2 * room.fixes]
    styles = {"+": "green", "-": "red"}
    kept = [Text(page.say(line), styles[line[0]]) for line in shown]
    left = len(lines) - len(shown)
    more = [Text(f"  +{left} more lines of diff, in fixes.diff", "dim")] if left > 0 else []
    return [*fixes, *kept, *more]


def _items(page: _Page, label: str, most: int, room: _RowLimits) -> list[Text]:
    return _labelled(page, label, first(page.items[label].texts, most), room)


def _labelled(page: _Page, label: str, texts: Sequence[str], room: _RowLimits) -> list[Text]:
    indent = 2 if page.narrow else _LABEL
    return labelled(label, map(page.say, texts), page.width, indent=indent, lines=room.text)


def _written(page: _Page, paths: Mapping[str, Path]) -> list[Text]:
    """Return the files: the page first, and those of one folder in one sentence."""
    room = page.width - page.indent
    folders: dict[Path, list[str]] = {}
    for path in paths.values():
        folders.setdefault(path.parent, []).append(path.name)
    lines = []
    for folder, names in folders.items():
        first_name, *others = names
        whole = keep_right(page.say(str(from_here(folder / first_name))), room)
        lines += wrap(page.say(", ".join([whole, *others])), room)
    return [
        Text(("wrote" if i == 0 else "").ljust(page.indent), "bold").append(line, "cyan")
        for i, line in enumerate(lines)
    ]


def _next(page: _Page, command: str | None) -> list[Text]:
    if not command:
        return []
    indent = page.indent
    lines = [Text("next".ljust(indent), "bold")]
    for word in shell_words(page.say(command)):
        if lines[-1].cell_len > indent and lines[-1].cell_len + cell_len(word) + 3 > page.width:
            lines[-1].append(" \\")
            lines.append(Text(" " * indent))
        lines[-1].append((" " if lines[-1].cell_len > indent else "") + word, "bold cyan")
    return lines


def _evidence(page: _Page, room: _RowLimits) -> list[Text]:
    heads, rows = figure_rows(page.report)
    if not heads:
        return []
    label, column = (page.width - 10 * len(heads), 10) if page.narrow else (18, 11)
    bars = 0 if page.narrow else min(page.width - label - column * len(heads) - 2, 40)
    figures = [row for row in rows if not row.kind]
    kinds = [row for row in rows if row.kind][: room.kinds]
    longest = max((max(row.bar) for row in kinds), default=0) or 1
    columns = [Column(width=max(label, 0), gap=0)]
    columns += [Column(head=head, width=column, gap=0, right=True) for head in heads]
    cells: list[tuple[str | Text, ...]] = [
        (page.say(row.name), *row.cells, _bar(page, row, bars * max(row.bar) / longest))
        for row in (*figures, *kinds)
    ]
    head, *lines = TextTable([*columns, Column(width=bars)], cells).lines(page.width)
    legend = "  at the peak" + (" (. saved)" if page.report.planned else ", by kind")
    return [head.append(legend if bars >= len(legend) else "", "dim"), *lines]


def _bar(page: _Page, row: FigureRow, length: float) -> Text:
    if not row.kind or not length:
        return Text()
    before, after = row.bar
    kept = round(length * min(before, after) / max(before, after))
    less = after < before
    bar = Text().append(("█" if page.fancy else "#") * kept, "cyan")
    return bar.append(("." if less else "+") * (round(length) - kept), "dim" if less else "red")


def _more(title: str, total: int, shown: int) -> Text:
    line = Text(title, "bold")
    if total <= shown:
        return line
    note_cut(title)
    return line.append(f" (top {shown}, +{total - shown} more)", "dim")


def _holders(page: _Page, room: _RowLimits) -> list[Text]:
    shown = page.report.holders[: room.holders]
    if not shown:
        return []
    home = facts.home(page.report)
    title = _more("live at the peak", len(page.report.holders), len(shown))
    rows = [
        (format_bytes(one.bytes), page.say(owner_of(one, home)), page.say(reason_of(one, home)))
        for one in shown
    ]
    left = page.width - 12
    share = max(left - 12, 0) if page.narrow else 2 * left // 3
    size = Column(width=10, gap=0, right=True)
    owner = Column(width=share, fitted=True, keep=keep_right, style="cyan")
    columns = (size, owner, Column(least=10, style="dim"))
    if (
        max(cell_len(who) for _, who, _ in rows) + max(cell_len(why) for *_, why in rows) + 2
        <= left
    ):
        return [title, *TextTable(columns, rows).lines(page.width)]
    if room.text < 2:
        words = (one.what or one.why if one.made_path else reason_of(one, home) for one in shown)
        rows = [(*row[:2], page.say(word)) for row, word in zip(rows, words, strict=True)]
        return [title, *TextTable(columns, rows).lines(page.width)]
    lines = [title]
    for number, who, why in rows:
        parts = [(line, "cyan") for line in sentence(who, left, room.text)]
        if len(parts) == 1 and cell_len(who + why) + 2 <= left:
            row = [Text(who, "cyan").append(f"  {why}", "dim")]
        else:
            parts += ((line, "dim") for line in sentence(why, left, room.text))
            row = [Text(*part) for part in parts]
        sizes = (padded(number, 10, right=True), *[" " * 10] * (len(row) - 1))
        lines += (Text(f"{size}  ") + line for size, line in zip(sizes, row, strict=True))
    return lines


def _findings(page: _Page, room: _RowLimits) -> list[Text]:
    report = page.report
    if not report.findings:
        return []
    shown = report.findings[: room.findings]
    most = page.width - 19 if page.narrow else page.width // 4
    places = [keep_right(page.place(f.path, f.line), most) for f in shown]
    column = min(max(map(cell_len, places)), most)
    title = _more(facts.count_of(report.findings), len(report.findings), len(shown))
    room_left = page.width - title.cell_len - 2
    lines = [title.append(": " + keep_left(facts.families(report.findings), room_left))]
    for finding, where in zip(shown, places, strict=True):
        lines += _finding(page, finding, padded(where, column), room)
    return lines


def _finding(page: _Page, finding: Finding, where: str, room: _RowLimits) -> list[Text]:
    line = Text("  ").append(keep_left(page.say(finding.code), 6), "bold yellow")
    line.append("  " + where + "  ", "cyan")
    price, message = facts.price(finding), page.say(finding.message)
    if page.narrow:
        line.append(price if line.cell_len + len(price) <= page.width else "").rstrip()
        said = sentence(message, page.width - 4, room.text)
        return [line, *(Text("    " + text) for text in said)]
    indent = line.cell_len
    room_left = page.width - indent - (len(price) + 2 if price else 0)
    begun, *rest = sentence(message, room_left, room.text) or [""]
    line.append(padded(begun, room_left) + "  " + price).rstrip()
    return [line, *(Text(" " * indent + text) for text in rest)]


def _frontier(page: _Page, room: _RowLimits) -> list[Text]:
    points = page.report.frontier
    shown = frontier_shown(points, max(room.findings, _BUDGETS))
    if not shown:
        return []
    title = _more("other budgets", len(points), len(shown))
    title.append(page.say(f": step{on_device(points)}; techniques x places"))
    rows = [
        (
            format_bytes(one.budget_bytes),
            format_bytes(one.peak_bytes),
            format_seconds(one.step_seconds),
            page.say(way_of(one)),
        )
        for one in shown
    ]
    heads = ("budget", "peak", "step")
    figures = [Column(head=head, width=10, gap=0, right=True) for head in heads]
    return [title, *TextTable([*figures, Column(head="plan")], rows).lines(page.width)]
