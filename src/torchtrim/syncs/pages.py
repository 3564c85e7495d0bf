"""Writes the table of waits as documentation: `python -m torchtrim.syncs.pages docs/waits.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from torchtrim.syncs.base import Evidence, Row
from torchtrim.syncs.idioms import FREE, WAITING, Idiom
from torchtrim.syncs.lookup import FAMILIES, ROWS, holds
from torchtrim.syncs.sources import REF

VERSIONS = ("2.11", "2.12", "2.13", "2.14", "2.15")

_INTRODUCTION = f"""# Host-device syncs

The host queues work for a CUDA device and goes on. Where it needs a value, a shape or memory from the
device, or gives it memory that may change, it is blocked until the device has caught up. The table
says which operators do that, when, and where it is written. An operator without a row does not wait.

Rows are asked with the arguments of each call. What a tensor's device is comes from the run: on an
emulated accelerator it is the device that the script asked for. Every line linked here was read in
PyTorch {REF}. Nearly all of them stand in 2.9.1 too, as the rows' versions say, and in the headers and the
Python code of 2.13; compiled code of 2.13 and later was not read, but run: each row is asked in tests
with 2.13, 2.14 and 2.15.

`TT101` is a value read, `TT102` a shape that depends on data, `TT103` an upload, `TT104` a call that asks
for a wait, `TT105` a race, which is what a missing wait can be.
"""

_IDIOMS = """## Lines that come down to these rows

| what | row | how often | source |
|---|---|---|---|
"""

_FREE = """## Lines that do not wait

| what | | source |
|---|---|---|
"""

_MATRIX = "## By version of torch\n\n"


def page() -> str:
    """The table as Markdown."""
    families = "\n".join(_family(name, rows) for name, rows in FAMILIES.items())
    waiting = _IDIOMS + "".join(map(_waiting, WAITING))
    free = _FREE + "".join(map(_free, FREE))
    return "\n".join((_INTRODUCTION, families, waiting, free, _matrix()))


def write(path: Path) -> None:
    """Write the page."""
    path.write_text(page(), encoding="utf-8")


def _family(name: str, rows: Iterable[Row]) -> str:
    return f"## {name}\n\n" + "\n".join(map(_row, rows))


def _row(row: Row) -> str:
    asked = ", ".join(f"`{operator}`" for operator in row.operators) or "no operator"
    lines = (
        f"### {row.name} ({row.code})\n",
        f"{row.what}.\n",
        f"* **Waits when** {row.when}.",
        f"* **Operators** {asked}.",
        f"* **Versions** {_versions(row)}.",
        f"* **Source** {'; '.join(map(_source, row.evidence))}.",
        f"* **Instead** {row.advice}",
    )
    return "\n".join(lines) + "\n"


def _versions(row: Row) -> str:
    if row.since and row.until:
        return f"from {row.since}, before {row.until}"
    return f"from {row.since}" if row.since else f"before {row.until}" if row.until else "all"


def _source(evidence: Evidence) -> str:
    name = evidence.path.rpartition("/")[2]
    return f"[{name}:{evidence.line}]({evidence.url}), {evidence.note}"


def _waiting(idiom: Idiom) -> str:
    rows = ", ".join(idiom.rows)
    return f"| {_cell(idiom.what)} | {rows} | {idiom.times} | {_source(idiom.evidence)} |\n"


def _free(idiom: Idiom) -> str:
    return f"| {_cell(idiom.what)} | {idiom.times} | {_source(idiom.evidence)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _matrix() -> str:
    head = f"| row | code | {' | '.join(VERSIONS)} |\n|---|---|{'---|' * len(VERSIONS)}\n"
    return _MATRIX + head + "".join(map(_line, ROWS))


def _line(row: Row) -> str:
    marks = " | ".join("waits" if holds(row, version) else "" for version in VERSIONS)
    return f"| {row.name} | {row.code} | {marks} |\n"


def main(arguments: list[str]) -> None:
    """The command: one argument, the file."""
    if len(arguments) != 1:
        raise SystemExit("give one file: python -m torchtrim.syncs.pages docs/waits.md")
    write(Path(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
