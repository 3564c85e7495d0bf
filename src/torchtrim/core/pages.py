"""Writes the glossary's page: `python -m torchtrim.core.pages docs/glossary.md`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from torchtrim.core.glossary import GLOSSARY

_HEAD = """# Glossary

The words of torchtrim's output, from verdicts and plans. `torchtrim explain WORD` prints
one of them. [glossary.toml](../src/torchtrim/core/glossary.toml) has the texts, and
`python -m torchtrim.core.pages docs/glossary.md` writes this page.

"""


def page() -> str:
    """Return the words and their meanings as Markdown, in alphabetical order."""
    words = sorted(GLOSSARY.items(), key=lambda item: item[0].casefold())
    return _HEAD + "\n".join(f"**{word}**: {_literal(text)}\n" for word, text in words)


def _literal(text: str) -> str:
    """Escape what Markdown would read as a mark, outside of code."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*_\[\]<>])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def main(arguments: list[str]) -> None:
    """Run the command: one argument, the page."""
    if len(arguments) != 1:
        raise SystemExit("give one file: python -m torchtrim.core.pages docs/glossary.md")
    Path(arguments[0]).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
