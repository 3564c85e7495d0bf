"""What a program asks for and nobody knows without running it: where it asked, and what it was told."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from torchtrim.dispatch.places import Places, line_of


class Guess(NamedTuple):
    """A line that asked, and the assumption there."""

    path: str
    line: int
    assumed: str


class Guesses:
    """Collects guesses by line."""

    def __init__(self, project: str) -> None:
        self._places = Places(project)
        self.found: Counter[Guess] = Counter()

    def add(self, assumed: str) -> None:
        """The line that runs now was told something that is not known."""
        path, line = self._line()
        self.found[Guess(path, line, assumed)] += 1

    def where(self) -> str:
        """` at FILE:LINE` of the line that runs now; empty where it is torch's own."""
        path, line = self._line()
        return f" at {path}:{line}" if path else ""

    def notes(self) -> tuple[str, ...]:
        """A sentence for each guess, the most frequent first."""
        return tuple(
            f"{_short(guess.path)}:{guess.line}: {guess.assumed}"
            for guess, _ in self.found.most_common()
        )

    def _line(self) -> tuple[str, int]:
        spot, caller = self._places.find(sys._getframe(2))
        found = caller or spot
        return ("", 0) if found is None else (found[0].co_filename, line_of(found))


def _short(path: str) -> str:
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if path and Path(path).is_relative_to(here) else path
