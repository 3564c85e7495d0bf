"""Reads the user's source where a finding points: the text of a line, the function around it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

from torchtrim.records.files import read_head
from torchtrim.records.finding import Equivalence, Finding, Source, Suggestion
from torchtrim.records.profile import Growth, Place, Profile

_MOST_BYTES = 4 * 2**20  # Arbitrary: far above any source file written by hand.
_MOST_CHARACTERS = 4096  # As long as a text of an allow-list may be (records/allow.py).
_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class SourceLines:
    """Lines of Python files. Each file is read once, up to 4 MiB of it; a missing file is empty.

    Relative paths start at the project's folder.
    """

    def __init__(self, project: str) -> None:
        self._project = project
        self._texts: dict[str, str] = {}
        self._scopes: dict[str, list[tuple[int, int, str]]] = {}

    def line(self, path: str, number: int) -> str:
        """Return the line without surrounding blanks, at most 4,096 characters, or `""`."""
        lines = self._text(path).split("\n")
        return lines[number - 1].strip()[:_MOST_CHARACTERS] if 0 < number <= len(lines) else ""

    def function(self, path: str, number: int) -> str:
        """Return the qualified name of the innermost function or class around a line, or `""`."""
        if path not in self._scopes:
            self._scopes[path] = _scopes(self._text(path))
        around = [
            (end - start, name) for start, end, name in self._scopes[path] if start <= number <= end
        ]
        return min(around)[1][:_MOST_CHARACTERS] if around else ""

    def _text(self, path: str) -> str:
        if path not in self._texts:
            is_python = Path(path).suffix == ".py"
            self._texts[path] = text_of(self._project, path) if is_python else ""
        return self._texts[path]


def text_of(project: str, path: str) -> str:
    """Return a file's text, empty if it is missing, unreadable or not a regular file."""
    try:
        return read_head(Path(project, path), _MOST_BYTES).decode("utf-8", errors="replace")
    except (OSError, ValueError):
        return ""


def _scopes(text: str) -> list[tuple[int, int, str]]:
    """Return the first line, last line and qualified name of each function and class."""
    try:
        pending: list[tuple[ast.AST, str]] = [(ast.parse(text), "")]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    scopes = []
    while pending:
        node, prefix = pending.pop()
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, _Scope):
                name = f"{prefix}.{child.name}" if prefix else child.name
                scopes.append((child.lineno, child.end_lineno or child.lineno, name))
            pending.append((child, name))
    return scopes


class CodeLine(NamedTuple):
    """A line of source; line 0 of the script if the line is unknown."""

    path: str
    line: int

    def finding(
        self,
        code: str,
        message: str,
        advice: str,
        *,
        equivalence: Equivalence | None = None,
        count_per_step: int = 1,
        price_ms: float | None = None,
        price_bytes: int | None = None,
        source: Source = "measured",
    ) -> Finding:
        """Return a finding on this line, with advice."""
        return Finding(
            code=code,
            path=self.path,
            line=self.line,
            end_line=self.line,
            message=message,
            count_per_step=count_per_step,
            price_ms=price_ms,
            price_bytes=price_bytes,
            source=source,
            fix=Suggestion(kind="advice", equivalence=equivalence, reason=advice),
        )


def line_of(profile: Profile, operator: int) -> CodeLine:
    """Return the line that called an operator; for one in backward, the line of its forward operator."""
    if operator < 0:
        return CodeLine(profile.script, 0)
    forward = profile.operators[operator].forward
    return line_at(profile, profile.place_of(forward if forward >= 0 else operator))


def line_at(profile: Profile, place: Place | None) -> CodeLine:
    """Return the line of a place; line 0 of the script if it is unknown."""
    return CodeLine(place.path, place.line) if place else CodeLine(profile.script, 0)


def line_of_growth(profile: Profile, growth: Growth) -> tuple[CodeLine, str]:
    """Return the user's line that fills a container, and for a message the line inside a library, if any."""
    filled, caller = (
        profile.places[index] if index >= 0 else None for index in (growth.place, growth.caller)
    )
    inside = ""
    if caller is not None and filled is not None:
        file = filled.path.replace("\\", "/").rpartition("/")[2]
        inside = f", filled at {file}:{filled.line} in {filled.function}"
    return line_at(profile, caller or filled), inside
