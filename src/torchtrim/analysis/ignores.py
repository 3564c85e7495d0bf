"""`# torchtrim: ignore[TT101]` on a line of source."""

from __future__ import annotations

import re
from pathlib import Path

from torchtrim.records.files import read_head
from torchtrim.records.finding import Finding

_MOST_BYTES = 4 * 2**20
_COMMENT = re.compile(r"#\s*torchtrim:\s*ignore\[([A-Z0-9,\s]*)\]", re.IGNORECASE)


class Ignores:
    """Which findings the source asks to leave out. Each file is read once, up to 4 MiB of it.

    Relative paths are taken from the project's folder. A file that is missing covers nothing.
    """

    def __init__(self, project: str) -> None:
        self._project = project
        self._codes: dict[str, dict[int, frozenset[str]]] = {}

    def cover(self, finding: Finding) -> bool:
        """Whether a line of the finding carries a comment with its code."""
        if finding.line <= 0:
            return False
        if finding.path not in self._codes:
            self._codes[finding.path] = ignored_codes(_text(self._project, finding.path))
        codes = self._codes[finding.path]
        return any(
            finding.line <= line <= max(finding.line, finding.end_line) and finding.code in found
            for line, found in codes.items()
        )


def ignored_codes(text: str) -> dict[int, frozenset[str]]:
    """The codes that each line of a source asks to leave out, by its number."""
    return {
        number: frozenset(match[1].upper().replace(",", " ").split())
        for number, line in enumerate(text.splitlines(), start=1)
        if (match := _COMMENT.search(line))
    }


def _text(project: str, path: str) -> str:
    """The file's text; empty for what is missing, unreadable or no regular file."""
    try:
        return read_head(Path(project, path), _MOST_BYTES).decode("utf-8", errors="replace")
    except (OSError, ValueError):
        return ""
