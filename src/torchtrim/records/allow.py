"""The allow-list: findings that a project accepts, in a file it commits. The file is untrusted input."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from torchtrim.records.files import load_toml, toml_lines, write_atomically
from torchtrim.records.finding import Finding

FILE_NAME = "torchtrim-allow.toml"
MOST_ENTRIES = 10_000  # Arbitrary; large enough for any project, small enough to be read at once.
_MOST_BYTES = 2**22  # Arbitrary; bounds what a hostile file makes us read.
_ALWAYS = ("path", "line_text")
_HEAD = (
    "# Findings that this project accepts, each with its count per step.",
    "# Written by `torchtrim diagnose SCRIPT --update-allow`, which keeps every reason.",
)

Code = Annotated[str, Meta(pattern=r"^TT\d{3}$")]
Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0, le=2**31)]


class Entry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An accepted finding: up to `count` of `code` per step on lines that read `line_text`.

    `path` is relative to the project, with forward slashes. `line_text` is the stripped source line, so
    the entry still matches after lines above it are added or removed. An empty `function` matches any.
    """

    code: Code
    path: Text
    function: Text = ""
    line_text: Text
    count: Count
    reason: Text = ""


class AllowList(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The findings a project accepts."""

    schema_version: Literal[1] = 1
    allow: Annotated[tuple[Entry, ...], Meta(max_length=MOST_ENTRIES)] = ()


class AllowedFinding(Struct, frozen=True, kw_only=True):
    """An entry of the allow-list and the finding it covered.

    `used` of the `count` allowed per step occurred at `line`. An entry that matches nothing any more has
    `used` 0 and `line` 0.
    """

    code: str
    path: str
    function: str = ""
    line_text: str = ""
    line: int = 0
    count: int
    used: int
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class PassedLimit:
    """An exceeded limit, in words, and the findings that exceed it, each with its excess count."""

    limit: str
    findings: tuple[Finding, ...] = ()


def load_allow(path: Path) -> AllowList:
    """Load an allow-list. Raises `UnreadableInput`, naming the field, if the file is not one."""
    return load_toml(
        path,
        AllowList,
        name="allow-list",
        most=_MOST_BYTES,
        newer="Update torchtrim.",
        correction="Correct that field: an entry has code, path, line_text and count, and may have "
        "function and reason.",
    )


def save_allow(entries: Iterable[Entry], path: Path) -> None:
    """Write an allow-list as TOML, atomically."""
    write_atomically(path, allow_text(entries).encode())


def allow_text(entries: Iterable[Entry]) -> str:
    """Return the entries as TOML, for people to read, edit and commit."""
    lines = list(_HEAD)
    for entry in entries:
        fields = msgspec.structs.asdict(entry)
        empty = [name for name, value in fields.items() if value == "" and name not in _ALWAYS]
        lines += ["", "[[allow]]", *toml_lines(fields, skip=empty)]
    return "\n".join(lines) + "\n"
