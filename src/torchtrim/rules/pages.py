"""Writes the rules' documentation: `python -m torchtrim.rules.pages docs/rules`."""

from __future__ import annotations

import sys
from pathlib import Path

from torchtrim.rules.registry import all_rules, explain

_INDEX = """# Rules

Each finding has a code. `TT1xx` are host-device syncs, `TT2xx` memory, `TT3xx` input, `TT4xx`
kernels and attention, `TT5xx` streams, `TT6xx` several ranks. A code never changes its meaning.
`torchtrim explain CODE` prints a page of this folder, and `# torchtrim: ignore[CODE]` on a line of source
leaves its findings out.

| code | name | what it is |
|---|---|---|
"""


def pages() -> dict[str, str]:
    """Return the index and each rule's page as Markdown, by file name."""
    rows = (f"| [{r.code}]({r.stem}.md) | {r.name} | {r.summary} |\n" for r in all_rules())
    return {"index.md": _INDEX + "".join(rows)} | {
        f"{found.stem}.md": explain(found.code) for found in all_rules()
    }


def write(folder: Path) -> None:
    """Write all pages into a folder, creating it if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Run the command: one argument, the folder."""
    if len(arguments) != 1:
        raise SystemExit("give one folder: python -m torchtrim.rules.pages docs/rules")
    write(Path(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
