"""Writes the published JSON Schemas: `python -m torchtrim.report.schemas docs/schema`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from inspect import cleandoc
from pathlib import Path
from typing import Any

import msgspec

from torchtrim.records import Plan, Profile, Report
from torchtrim.records.comparison import Comparison
from torchtrim.records.trace import TraceReport

_RECORDS: dict[str, type[msgspec.Struct]] = {
    "report": Report,
    "profile": Profile,
    "plan": Plan,
    "trace": TraceReport,
    "comparison": Comparison,
}


def schemas() -> Mapping[str, bytes]:
    """Return the schema of each record that torchtrim writes as JSON, by file name."""
    return {f"{name}.schema.json": _schema(record) for name, record in _RECORDS.items()}


def write(folder: Path) -> None:
    """Write every schema into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, contents in schemas().items():
        (folder / name).write_bytes(contents)


def _schema(record: type[msgspec.Struct]) -> bytes:
    schema = _dedented(msgspec.json.schema(record))
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    encoded = msgspec.json.encode(dialect | schema, order="sorted")
    return msgspec.json.format(encoded, indent=2) + b"\n"


def _dedented(value: Any) -> Any:
    """Dedent descriptions in `value`, as Python 3.13 does for docstrings and older versions do not."""
    if isinstance(value, dict):
        return {
            key: cleandoc(item)
            if key == "description" and isinstance(item, str)
            else _dedented(item)
            for key, item in value.items()
        }
    return [_dedented(item) for item in value] if isinstance(value, list) else value


def main(arguments: list[str]) -> None:
    """Run the command with one argument, the folder."""
    if len(arguments) != 1:
        raise SystemExit("pass one folder: python -m torchtrim.report.schemas docs/schema")
    write(Path(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
