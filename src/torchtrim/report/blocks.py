"""What outputs are made of: sentences under a label, tables, and a count of what is left out.

Only this cuts, wraps, aligns and escapes them, on a terminal and as Markdown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from torchtrim.report.safe import clean, keep_left, sentence

_MOST_CHARACTERS = 300
_SPECIAL = re.compile(
    r"(?P<mark>[&<>\\`*_\[\]|~$])|(?P<reference>[@#](?=\w)|:(?=//)|(?<=www)\.)", re.IGNORECASE
)


@dataclass(frozen=True)
class Items:
    """Sentences with their label on a terminal and their title in Markdown."""

    label: str
    title: str
    texts: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column and how a terminal shows it: `gap` blanks, then `width` cells, else the rest of the line.

    A `fitted` column is no wider than its widest cell. Numbers are aligned `right` and never cut; other
    cells are cut by `keep`. Where less than `least` is left of the line, the column is left out.
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
class Table:
    """Rows with a cell for each column. `Text` has a style of its own and `Markup` is Markdown already."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str | Text]]

    def lines(self, width: int) -> Iterator[Text]:
        """The heads, if there are any, and the rows in lines of a terminal."""
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
        """The table as Markdown, with a sentence on rows that were left out."""
        rules = ("--:|" if column.right else "---|" for column in self.columns)
        lines = [markdown_row(*(column.head for column in self.columns)), "|" + "".join(rules)]
        lines += [markdown_row(*row) for row in self.rows]
        return "\n".join([*lines, "", rest] if rest else lines)


def padded(text: str, width: int, *, right: bool = False) -> str:
    """`text` with blanks up to `width` cells."""
    blanks = " " * (width - cell_len(text))
    return blanks + text if right else text + blanks


def first(texts: Iterable[str], most: int, rest: str = "+{} more") -> list[str]:
    """At most so many texts, and one that counts the others."""
    every = list(texts)
    return [*every[:most], *([rest.format(len(every) - most)] if len(every) > most else [])]


def labelled(
    label: str,
    texts: Iterable[str],
    width: int,
    *,
    indent: int,
    lines: int,
) -> list[Text]:
    """Sentences of at most so many lines beside their label, or under it where that is too long."""
    room = width - indent
    pieces = [piece for text in texts for piece in sentence(text, room, lines)]
    if not pieces:
        return []
    beside = len(label) < indent
    head = padded(label, indent) + pieces[0] if beside else label
    rest = pieces[1:] if beside else pieces
    return [Text(head, "bold"), *(Text(" " * indent + piece) for piece in rest)]


def show(lines: Iterable[Text], console: Console) -> None:
    """Print lines as they are: the terminal neither wraps nor cuts them."""
    for line in lines:
        console.print(line, no_wrap=True, crop=False, overflow="ignore", soft_wrap=True)


def markdown_items(items: Items, most: int) -> str:
    """The title and at most so many sentences, as a list; empty where there is none."""
    lines = [f"* {escape(text)}" for text in first(items.texts, most, "and {} more")]
    return "\n".join([f"**{items.title}**", "", *lines]) if lines else ""


def markdown_row(*cells: str | Text) -> str:
    """A row of a table; what is not `Markup` is escaped."""
    texts = (cell if isinstance(cell, Markup) else escape(str(cell)) for cell in cells)
    return f"| {' | '.join(texts)} |"


def escape(text: str) -> str:
    """Text that Markdown and GitHub leave alone: no markup, no mention, no reference, at most a line."""
    line = clean(text)
    cut = line if len(line) <= _MOST_CHARACTERS else line[: _MOST_CHARACTERS - 3] + "..."
    return _SPECIAL.sub(_harmless, cut)


def _harmless(match: re.Match[str]) -> str:
    """A mark as an entity; a reference with an invisible space, without which it would be a link."""
    reference = match.lastgroup == "reference"
    return f"{match[0]}&#8203;" if reference else f"&#{ord(match[0])};"
