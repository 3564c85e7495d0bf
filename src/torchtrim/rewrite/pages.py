"""Writes the page of all cures: `python -m torchtrim.rewrite.pages docs/cures.md`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from torchtrim.records.files import write_atomically
from torchtrim.rewrite.base import Cure
from torchtrim.rewrite.registry import all_cures

_HEAD = """# Cures

What `torchtrim optimize --fix` and `torchtrim lint --fix` write, one cure a section. A cure is made without
being asked for only where a run has shown what it rests on; `--unsafe-fixes` makes the others too.
After each round the script is run again: the waits at the line must be gone and the certificate must
hold, else the cure is taken back. [How to use them](how-to/cure-waits.md).

| cure | of | at most |
|---|---|---|
"""


def page() -> str:
    """The page, in Markdown."""
    cures = all_cures()
    rows = "".join(f"| [{c.name}](#{c.name}) | {_codes(c)} | {c.equivalence} |\n" for c in cures)
    return _HEAD + rows + "".join(_sections(cures))


def _sections(cures: tuple[Cure, ...]) -> Iterator[str]:
    for cure in cures:
        doc = inspect.cleandoc(sys.modules[cure.write.__module__].__doc__ or "")
        yield f"\n## {cure.name}\n\n{doc}\n"


def _codes(cure: Cure) -> str:
    return ", ".join(cure.codes)


def main() -> None:
    """Write the page to the path given."""
    write_atomically(Path(sys.argv[1]), page().encode())


if __name__ == "__main__":
    main()
