"""The user's source, where a finding points: the text of a line, the function around it."""

from __future__ import annotations

import ast
from pathlib import Path

from torchtrim.records.files import read_head

_MOST_BYTES = 4 * 2**20
_MOST_CHARACTERS = 4096  # As long as a text of an allow-list may be (records/allow.py).
_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Source:
    """Lines of Python files. Each file is read once, up to 4 MiB of it; a missing one is empty.

    Relative paths are taken from the project's folder.
    """

    def __init__(self, project: str) -> None:
        self._project = project
        self._texts: dict[str, str] = {}
        self._scopes: dict[str, list[tuple[int, int, str]]] = {}

    def line(self, path: str, number: int) -> str:
        """The line without the blanks around it, at most 4,096 characters; `""` where there is none."""
        lines = self._text(path).split("\n")
        return lines[number - 1].strip()[:_MOST_CHARACTERS] if 0 < number <= len(lines) else ""

    def function(self, path: str, number: int) -> str:
        """The qualified name of the innermost function or class around a line; `""` for none."""
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
    """First line, last line and qualified name of each function and class."""
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
