"""The blocks of outputs: labelled sentences, tables, and counts of omitted rows.

Only this module cuts, wraps, aligns and escapes them, for terminals and for Markdown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from torchtrim.report.safe import at_most, clean, keep_left, note_cut, sentence

SCREEN = 24  # The lines of a classic terminal.
WIDEST = 120  # Arbitrary; longer lines are hard to read.
_MOST_CHARACTERS = 300  # Arbitrary; three lines of a comment on GitHub.
_SPECIAL = re.compile(
    r"(?P<mark>[&<>\\`*_\[\]|~$])|(?P<reference>[@#](?=\w)|:(?=//)|(?<=www)\.)", re.IGNORECASE
)


@dataclass(frozen=True)
class Items:
    """Sentences with a label for terminals and a title for Markdown."""

    label: str
    title: str
    texts: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table. On a terminal it has `gap` blanks, then `width` cells or the rest of the line.

    A `fitted` column shrinks to its widest cell. Cells aligned `right` are numbers and never cut; `keep` cuts
    the others. A column without a width is omitted if fewer than `least` cells of the line remain.
    """

    head: str = ""
    width: int | None = None
    gap: int = 2
    right: bool = False
    fitted: bool = False
    keep: Callable[[str, int], str] = keep_left
    style: str = ""
    least: int = 1


@dataclass(frozen=True)
class TextTable:
    """Rows with a cell for each column. `Text` keeps its own style, and `Markup` is already Markdown."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str | Text]]

    def lines(self, width: int) -> Iterator[Text]:
        """Yield the heads, if any, and the rows as lines for a terminal."""
        widths = list(self._widths(width))
        heads = [column.head for column in self.columns]
        if any(heads):
            yield self._line(heads, widths, "bold")
        yield from (self._line(row, widths) for row in self.rows)

    def _widths(self, left: int) -> Iterator[int]:
        for place, column in enumerate(self.columns):
            left -= column.gap
            if column.width is None and left < column.least:
                return
            width = left if column.width is None else column.width
            if column.fitted:
                cut = (cell_len(column.keep(str(row[place]), width)) for row in self.rows)
                width = min(max(cut, default=0), width)
            yield width
            left -= width

    def _line(self, row: Sequence[str | Text], widths: Sequence[int], style: str = "") -> Text:
        line = Text(style=style)
        for column, width, cell in zip(self.columns, widths, row, strict=False):
            line.append(" " * column.gap)
            if isinstance(cell, Text):
                line.append_text(cell)
            elif column.right:
                line.append(padded(cell, width, right=True))
            else:
                line.append(padded(column.keep(cell, width), width), column.style)
        line.rstrip()
        return line

    def markdown(self, rest: str = "") -> str:
        """Return the table as Markdown, followed by `rest`, a sentence on the omitted rows."""
        rules = ("--:|" if column.right else "---|" for column in self.columns)
        lines = [markdown_row(*(column.head for column in self.columns)), "|" + "".join(rules)]
        lines += [markdown_row(*row) for row in self.rows]
        return "\n".join([*lines, "", rest] if rest else lines)


def padded(text: str, width: int, *, right: bool = False) -> str:
    """Pad `text` with blanks to `width` cells."""
    blanks = " " * (width - cell_len(text))
    return blanks + text if right else text + blanks


def first(texts: Iterable[str], most: int, rest: str = "+{} more") -> list[str]:
    """Return at most `most` texts, and one that counts the others."""
    every = list(texts)
    if len(every) > most:
        note_cut(every[most])
    return [*every[:most], *([rest.format(len(every) - most)] if len(every) > most else [])]


def labelled(
    label: str,
    texts: Iterable[str],
    width: int,
    *,
    indent: int,
    lines: int,
) -> list[Text]:
    """Return sentences of at most `lines` lines each, beside their label or below it if it is too long."""
    room = width - indent
    pieces = [piece for text in texts for piece in sentence(text, room, lines)]
    if not pieces:
        return []
    beside = len(label) < indent
    head = padded(label, indent) + pieces[0] if beside else label
    rest = pieces[1:] if beside else pieces
    return [Text(head, "bold"), *(Text(" " * indent + piece) for piece in rest)]


def show(lines: Iterable[Text], console: Console) -> None:
    """Print lines without letting rich wrap or cut them."""
    for line in lines:
        console.print(line, no_wrap=True, crop=False, overflow="ignore", soft_wrap=True)


def markdown_items(items: Items, most: int) -> str:
    """Return the title and at most `most` sentences as a Markdown list, or an empty string."""
    lines = [
        f"* {escape(text)}" for text in first(items.texts, most, "and {} more, in report.json")
    ]
    return "\n".join([f"**{items.title}**", "", *lines]) if lines else ""


def markdown_row(*cells: str | Text) -> str:
    """Return a row of a Markdown table. Everything except `Markup` is escaped."""
    texts = (cell if isinstance(cell, Markup) else escape(str(cell)) for cell in cells)
    return f"| {' | '.join(texts)} |"


def escape(text: str) -> str:
    """Escape text so that Markdown and GitHub show it literally, on one line, without mentions or links."""
    line = clean(text)
    return _SPECIAL.sub(_harmless, at_most(line, _MOST_CHARACTERS))


def _harmless(match: re.Match[str]) -> str:
    """Replace a mark by its entity, and break a reference with a zero-width space so it is not linked."""
    if match.lastgroup != "reference":
        return f"&#{ord(match[0])};"
    return f"&#8203;{match[0]}" if match[0] == "." else f"{match[0]}&#8203;"
