"""CSV tables of buffers: read with all columns, and written with an added offset column."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtrim.errors import UnreadableInput
from torchtrim.memory.packing.buffers import Buffer
from torchtrim.records.files import MOST_BYTES, read_bounded

NEEDED = ("id", "lower", "upper", "size")
_OPTIONAL = ("alignment", "offset")
_WHOLE = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns and rows of a file, and the buffers they describe."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    buffers: Sequence[Buffer]


def read(path: Path) -> Table:
    """Read a table with the columns id, lower, upper and size, in any order and among others.

    An optional column alignment gives each buffer's alignment; an empty cell means 1. Raises
    `UnreadableInput` with the line and the column.
    """
    lines = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        columns = [name.strip() for name in next(lines, [])]
        places = _places(columns, path)
        rows: list[Sequence[str]] = []
        buffers: list[Buffer] = []
        seen: dict[str | int, int] = {}
        for row in lines:
            if not any(map(str.strip, row)):
                continue
            where = f"{path}, line {lines.line_num}"
            buffer = _buffer(row, len(columns), places, where)
            if buffer.id in seen:
                raise UnreadableInput(
                    f"{where}: id {_short(str(buffer.id))} is also used in line {seen[buffer.id]}; ids "
                    "must be unique."
                )
            seen[buffer.id] = lines.line_num
            rows.append(row)
            buffers.append(buffer)
    except csv.Error as error:
        raise UnreadableInput(
            f"{path}, line {lines.line_num}: {error}; expected comma-separated values."
        ) from None
    return Table(columns=columns, rows=rows, buffers=buffers)


def write(table: Table, offsets: Mapping[str | int, int]) -> bytes:
    """Return the table with a column `offset`, replaced if present and appended otherwise."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    columns = list(table.columns)
    if "offset" not in columns:
        columns.append("offset")
    at = columns.index("offset")
    writer.writerow(columns)
    for row, buffer in zip(table.rows, table.buffers, strict=True):
        writer.writerow([*row[:at], offsets[buffer.id], *row[at + 1 :]])
    return text.getvalue().encode()


def _text(path: Path) -> str:
    data = read_bounded(path, MOST_BYTES)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UnreadableInput(
            f"{path}, line {line}: byte {error.start} is not valid UTF-8; expected "
            "comma-separated values."
        ) from None


def _places(columns: Sequence[str], path: Path) -> dict[str, int]:
    for name in (*NEEDED, *_OPTIONAL):
        times = columns.count(name)
        if times > 1 or (not times and name in NEEDED):
            known = ", ".join(map(_short, columns[:12])) or "none"
            raise UnreadableInput(
                f"{path}, line 1: column {name!r} {'is repeated' if times else 'is missing'} among: "
                f"{known}. The first line names the columns; {', '.join(NEEDED)} are needed."
            )
    return {name: columns.index(name) for name in (*NEEDED, "alignment") if name in columns}


def _buffer(row: Sequence[str], width: int, places: Mapping[str, int], where: str) -> Buffer:
    if len(row) != width:
        raise UnreadableInput(f"{where}: {len(row)} values, but the first line names {width}.")
    name = row[places["id"]].strip()
    lower, upper, size = (_whole(row[places[c]], c, where) for c in NEEDED[1:])
    if not name:
        raise UnreadableInput(f"{where}: id is empty, but offsets are listed by id.")
    if size < 0:
        raise UnreadableInput(f"{where}: size is {size}; it must be 0 or more.")
    if upper < lower:
        raise UnreadableInput(
            f"{where}: upper is {upper}, less than lower, {lower}. A buffer is live from lower "
            "until just before upper."
        )
    return Buffer(name, lower, upper, size, _alignment(row, places, where))


def _alignment(row: Sequence[str], places: Mapping[str, int], where: str) -> int:
    text = row[places["alignment"]] if "alignment" in places else ""
    number = _whole(text, "alignment", where) if text.strip(" \t") else 1
    if number < 1:
        raise UnreadableInput(f"{where}: alignment is {number}; it must be 1 or more, or empty.")
    return number


def _whole(text: str, column: str, where: str) -> int:
    number = text.strip(" \t")
    if _WHOLE.fullmatch(number) is None:
        raise UnreadableInput(
            f"{where}: {column} is {_short(text)}; it must be a whole number, such as 4096."
        )
    return int(number)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
