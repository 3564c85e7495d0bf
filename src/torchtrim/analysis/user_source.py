"""Reads the user's source where a finding points: the text of a line, the function around it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from torchtrim.records.files import read_head
from torchtrim.records.profile import Profile

_MOST_BYTES = 4 * 2**20
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
            self._texts[path] = _read(Path(self._project), path)
        return self._texts[path]


def _read(project: Path, path: str) -> str:
    try:
        file = project / path
        if file.suffix != ".py":
            return ""
        return read_head(file, _MOST_BYTES).decode("utf-8", errors="replace")
    except (OSError, ValueError):
        return ""


def _scopes(text: str) -> list[tuple[int, int, str]]:
    """Return the first line, last line and qualified name of each function and class."""
    try:
        pending: list[tuple[ast.AST, str]] = [(ast.parse(text), "")]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = []
    while pending:
        node, prefix = pending.pop()
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, _Scope):
                name = f"{prefix}.{child.name}" if prefix else child.name
                found.append((child.lineno, child.end_lineno or child.lineno, name))
            pending.append((child, name))
    return found


class SourceLine(NamedTuple):
    """A line of source; line 0 of the script if the line is unknown."""

    path: str
    line: int


def line_of(profile: Profile, operator: int) -> SourceLine:
    """Return the line that called an operator; for one in backward, the line of its forward operator."""
    if operator < 0:
        return SourceLine(profile.script, 0)
    forward = profile.operators[operator].forward
    place = profile.place_of(forward if forward >= 0 else operator)
    return SourceLine(place.path, place.line) if place else SourceLine(profile.script, 0)


def by_line(profile: Profile, operators: Iterable[int]) -> dict[SourceLine, list[int]]:
    """Group operators by the line that called them."""
    lines: dict[SourceLine, list[int]] = defaultdict(list)
    for operator in operators:
        lines[line_of(profile, operator)].append(operator)
    return dict(lines)
