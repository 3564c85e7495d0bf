"""Writes the page of all fixes: `python -m torchtrim.rewriter.pages docs/fixes.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from torchtrim.records.files import write_atomically
from torchtrim.rewriter.fix import Fix
from torchtrim.rewriter.registry import all_fixes

_HEAD = """# Fixes

What `torchtrim optimize --fix` and `torchtrim lint --fix` write, one fix a section. A fix is applied without
being asked for only where a run has shown what it rests on; `--unsafe-fixes` applies the others too.
After each round the script is run again: the syncs at the line must be gone and the certificate must
hold, else the fix is reverted. [How to use them](how-to/fix-syncs.md).

| fix | of | at most |
|---|---|---|
"""


def page() -> str:
    """The page, in Markdown."""
    fixes = all_fixes()
    rows = "".join(f"| [{c.name}](#{c.name}) | {_codes(c)} | {c.equivalence} |\n" for c in fixes)
    return _HEAD + rows + "".join(_sections(fixes))


def _sections(fixes: tuple[Fix, ...]) -> Iterator[str]:
    for fix in fixes:
        yield f"\n## {fix.name}\n\n{fix.doc}\n"


def _codes(fix: Fix) -> str:
    return ", ".join(fix.codes)


def main(arguments: list[str]) -> None:
    """The command: one argument, the file."""
    if len(arguments) != 1:
        raise SystemExit("give one file: python -m torchtrim.rewriter.pages docs/fixes.md")
    write_atomically(Path(arguments[0]), page().encode())


if __name__ == "__main__":
    main(sys.argv[1:])
