"""Writes the page of all fixes: `python -m torchtrim.rewriter.pages docs/fixes.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from torchtrim.records.files import write_atomically
from torchtrim.rewriter.fix import all_fixes

_HEAD = """# Fixes

The rewrites of `torchtrim optimize --fix` and `torchtrim lint --fix`, one fix per section. A fix is applied
by default only if a run has confirmed its assumptions; `--unsafe-fixes` applies the others too. After each
round the script runs again: the syncs at the line must have disappeared and the certificate must hold, or the
fix is reverted. [How to use them](how-to/fix-syncs.md).

A fix writes no test of ranks, types or shapes, and keeps no old code beside the new: the whole
function around it runs on tiny tensors of many kinds, and wherever the original accepts a kind, both have to
return the same. If one differs, the report names it, and the fix is applied only with `--unsafe-fixes`. A
function that cannot run alone is proved for the kinds of the run. The report says which.

| fix | of | at most |
|---|---|---|
"""


def page() -> str:
    """Return the page as Markdown."""
    fixes = all_fixes()
    rows = [
        f"| [{fix.name}](#{fix.name}) | {', '.join(fix.codes)} | {fix.equivalence} |\n"
        for fix in fixes
    ]
    return "".join([_HEAD, *rows, *(f"\n## {fix.name}\n\n{fix.doc}\n" for fix in fixes)])


def main(arguments: list[str]) -> None:
    """Write the page to the file given as the only argument."""
    if len(arguments) != 1:
        raise SystemExit("expected one file: python -m torchtrim.rewriter.pages docs/fixes.md")
    write_atomically(Path(arguments[0]), page().encode())


if __name__ == "__main__":
    main(sys.argv[1:])
