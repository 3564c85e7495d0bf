"""Lines of source around a finding, where they can be read; bounded, and only from Python files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torchtrim.records.files import read_head
from torchtrim.report.safe import clean

_AROUND = 2
_MOST_LINES = 12
_MOST_BYTES = 2**20
_MOST_CHARACTERS = 160


@dataclass(frozen=True, kw_only=True)
class SourceLine:
    """A line of source; `hot` where the finding is."""

    number: int
    text: str
    hot: bool


def excerpt(
    path: str, line: int, end_line: int, folders: Iterable[Path] = ()
) -> tuple[SourceLine, ...]:
    """Lines `line` to `end_line` and two on each side; empty where the file cannot be read."""
    if line < 1:
        return ()
    first = max(line - _AROUND, 1)
    last = min(max(end_line, line) + _AROUND, first + _MOST_LINES - 1)
    lines = _lines(path, folders)
    return tuple(
        SourceLine(number=number, text=_text(lines[number - 1]), hot=line <= number <= end_line)
        for number in range(first, min(last, len(lines)) + 1)
    )


def _lines(path: str, folders: Iterable[Path]) -> list[str]:
    for candidate in (Path(path), *(folder / path for folder in folders)):
        try:
            if candidate.suffix == ".py" and candidate.is_file():
                return _read(candidate).split("\n")
        except (OSError, ValueError):
            continue
    return []


def _read(path: Path) -> str:
    return read_head(path, _MOST_BYTES).decode(errors="replace")


def _text(line: str) -> str:
    return clean(line.expandtabs(4).rstrip())[:_MOST_CHARACTERS]
