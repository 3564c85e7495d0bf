"""The code blocks of a document, and what stands in the comment above each.

    <!-- block: slow exit=1 says="BITWISE" -->

`file=NAME` writes the block instead of running it, `skip="why"` does neither, `slow` runs it only where
`TORCHTRIM_SLOW` is set, `exit=N` is the code that its last command ends with, and `says` is
what must stand in the output.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LANGUAGES = {"python": "python", "sh": "sh", "bash": "sh", "shell": "sh", "console": "sh"}
COMMANDS = ("torchtrim", "python", "pytest", "make", "pip")
FENCE = re.compile(
    r"(?:^<!-- block:(?P<about>[^>]*?)-->\n+)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of code. `line` is where it begins."""

    line: int
    language: str
    text: str
    options: dict[str, str]

    @property
    def is_slow(self) -> bool:
        """Whether it is run only on demand."""
        return "slow" in self.options

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block, continued lines joined."""
        joined = self.text.replace("\\\n", " ")
        return [line for line in joined.splitlines() if line.strip()]


def blocks(document: Path) -> Iterator[Block]:
    """The blocks of Python and shell. One without a language is shell if all its lines are commands."""
    text = document.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        language = LANGUAGES.get(match["kind"], "")
        if not match["kind"] and _are_commands(match["text"]):
            language = "sh"
        options = _options(match["about"] or "")
        if language or "file" in options:
            line = text.count("\n", 0, match.start("text"))
            yield Block(line=line, language=language, text=match["text"], options=options)


def _are_commands(text: str) -> bool:
    lines = text.replace("\\\n", " ").splitlines()
    return bool(lines) and all(line.split(" ")[0] in COMMANDS for line in lines)


def _options(about: str) -> dict[str, str]:
    words = (word.partition("=") for word in shlex.split(about))
    return {name: value for name, _, value in words}
