"""A report on a terminal: counts, then evidence, then the plan, then the one best next command."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from torchtrim.records import Report
from torchtrim.records.commands import shell_words
from torchtrim.report import estimates, facts, sections
from torchtrim.report.headline import headline
from torchtrim.report.ranks import rank_lines
from torchtrim.report.safe import keep_left, keep_right, sentence, wrap
from torchtrim.report.sections import NARROW, Page, Room
from torchtrim.report.tuned import tuned_lines

Amount = Literal["headline", "screen", "all"]
_SCREEN = 24
_LABEL = 13
_WIDEST = 120
_STYLES = {"good": "bold green", "bad": "bold red", "unsure": "bold yellow", "neutral": "bold"}

_EVERY = 10_000
_ALL = Room(
    kinds=_EVERY,
    holders=_EVERY,
    findings=_EVERY,
    notes=_EVERY,
    fixes=_EVERY,
    text=_EVERY,
    gaps=True,
)
_ROOMS = (
    Room(kinds=7, holders=8, findings=12, notes=6, fixes=12, text=6, gaps=True),
    Room(kinds=5, holders=5, findings=8, notes=4, fixes=8, text=3, gaps=True),
    Room(kinds=5, holders=4, findings=8, notes=4, fixes=8, text=2),
    Room(kinds=4, holders=3, findings=6, notes=3, fixes=6, text=2),
    Room(kinds=3, holders=3, findings=5, notes=2, fixes=4),
    Room(kinds=3, holders=2, findings=5, notes=1, fixes=3),
    Room(kinds=2, holders=2, findings=4, notes=1),
    Room(kinds=2, holders=1, findings=3, notes=1),
    Room(kinds=1, holders=1, findings=2, notes=1),
    Room(kinds=1, holders=0, findings=1, notes=1),
    Room(kinds=0, holders=0, findings=1, notes=1),
    Room(kinds=0, holders=0, findings=1, notes=0, fixes=1),
)


def render(
    report: Report,
    console: Console,
    *,
    next_command: str | None,
    paths: Mapping[str, Path] = {},
    amount: Amount = "screen",
) -> None:
    """Print the report, in under a screen where it can be; or its headline alone, or all of it.

    `paths` are the files that were written, by what they are; `next_command` is what to run next.
    """
    page = Page(
        report=report,
        width=min(console.width, _WIDEST),
        encoding=console.encoding,
        fancy=console.is_terminal and not console.options.ascii_only,
    )
    end = [*_written(page, paths), *_next(page, next_command)]
    if amount == "headline":
        lines = [*_verdict(page, _ROOMS[-1]), *_written(page, paths)]
    elif amount == "all":
        lines = [*_lines(page, _ALL), *end]
    else:
        lines = [*_fitting(page, _SCREEN - len(end)), *end]
    for line in lines:
        console.print(line, no_wrap=True, crop=False, overflow="ignore", soft_wrap=True)


def _fitting(page: Page, height: int) -> list[Text]:
    lines: list[Text] = []
    for room in _ROOMS:
        lines = _lines(page, room)
        if len(lines) <= height:
            break
    return lines


def _lines(page: Page, room: Room) -> list[Text]:
    order: tuple[Callable[[Page, Room], list[Text]], ...] = (
        _verdict,
        _missed,
        _fixes,
        sections.evidence,
        sections.holders,
        sections.findings,
        sections.frontier,
        _tail,
    )
    lines: list[Text] = []
    for section in order:
        found = section(page, room)
        if found and lines and room.gaps:
            lines.append(Text())
        lines += found
    return lines


def _verdict(page: Page, room: Room) -> list[Text]:
    """The sentence, and under it its further figures."""
    found = headline(page.report)
    lines = [Text(line, _STYLES[found.tone]) for line in wrap(page.say(found.word), page.width)]
    parts = (" ".join(sentence(page.say(one), page.width - 2, 2)) for one in found.parts)
    told = wrap(", ".join(parts), page.width - 2)
    return [*lines, *(Text(f"  {line}") for line in told)]


def _missed(page: Page, room: Room) -> list[Text]:
    """What is in the way of a budget that is missed, and what each lever on it would reach."""
    levers = facts.lever_lines(page.report) if room.notes else []
    wide = replace(room, text=max(room.text, 2)) if room.notes else room
    return [
        *_labelled(page, "smallest is", facts.part_lines(page.report), 1, wide),
        *_labelled(page, "levers", levers, min(4, room.findings), room),
    ]


def _proof(report: Report, room: Room) -> list[str]:
    """The certificate; where there is little room and every bit is equal, without figures, which are 0."""
    if report.certificate is None:
        return []
    lines = facts.certificate_lines(report.certificate)
    tight = not room.gaps and report.certificate.verdict == "BITWISE" and len(lines) > 2
    return [lines[0], *lines[2:]] if tight else lines


def _tail(page: Page, room: Room) -> list[Text]:
    report = page.report
    proof = _proof(report, room)
    return [
        *_labelled(page, "ranks", rank_lines(report), min(4, room.findings), room),
        *_labelled(page, "plan", facts.plan_lines(report), room.findings, room),
        *_labelled(page, "certificate", proof, len(proof), room),
        *_labelled(page, "estimate", estimates.estimate_lines(report), min(4, room.findings), room),
        *_labelled(page, "loader", tuned_lines(report), room.findings, room),
        *_labelled(page, "waits", facts.waiting_lines(report), min(2, room.findings), room),
        *_labelled(page, "note", report.notes, room.notes, room),
    ]


def _fixes(page: Page, room: Room) -> list[Text]:
    """The fixes, and as much of their diff as there is room for; the file has the rest."""
    told = facts.fix_lines(page.report)
    if not told:
        return []
    lines = [
        line for line in facts.diff_lines(page.report) if not line.startswith(("@@", "+++", "---"))
    ]
    shown = lines[: 2 * room.fixes]
    styles = {"+": "green", "-": "red"}
    kept = [Text(keep_left(page.say(line), page.width), styles[line[0]]) for line in shown]
    left = len(lines) - len(shown)
    more = [Text(f"  +{left} more lines of diff", "dim")] if left > 0 else []
    return [*_labelled(page, "fixes", told, 1 + room.fixes, room), *kept, *more]


def _labelled(page: Page, label: str, texts: Iterable[str], most: int, room: Room) -> list[Text]:
    every = list(texts)
    dropped = [f"+{len(every) - most} more"] if len(every) > most else []
    indent = _LABEL if page.width >= NARROW else 2
    pieces = [
        " " * indent + piece
        for text in (*every[:most], *dropped)
        for piece in sentence(page.say(text), page.width - indent, room.text)
    ]
    if not pieces or indent < _LABEL:
        return [Text(label, "bold"), *map(Text, pieces)] if pieces else []
    first = Text(label.ljust(indent), "bold").append(Text(pieces[0][indent:]))
    return [first, *map(Text, pieces[1:])]


def _written(page: Page, paths: Mapping[str, Path]) -> list[Text]:
    indent = _LABEL if page.width >= NARROW else 6
    room = page.width - indent
    names = [keep_right(page.say(str(_near(path))), room) for path in paths.values()]
    joined = ", ".join(names)
    lines = [joined] if cell_len(joined) <= room else names
    return [
        Text(("wrote" if i == 0 else "").ljust(indent), "bold").append(line, "cyan")
        for i, line in enumerate(lines if names else ())
    ]


def _near(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _next(page: Page, command: str | None) -> list[Text]:
    if not command:
        return []
    indent = _LABEL if page.width >= NARROW else 6
    lines = [Text("next".ljust(indent), "bold")]
    for word in shell_words(page.say(command)):
        if lines[-1].cell_len > indent and lines[-1].cell_len + cell_len(word) + 3 > page.width:
            lines[-1].append(" \\")
            lines.append(Text(" " * indent))
        lines[-1].append((" " if lines[-1].cell_len > indent else "") + word, "bold cyan")
    return lines
