"""The allow-list: findings that a project accepts, in a file that it commits. Input is not trusted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from torchtrim.records.files import load_toml, write_atomically
from torchtrim.records.finding import Finding

FILE_NAME = "torchtrim-allow.toml"
MOST_ENTRIES = 10_000  # Arbitrary; large enough for any project, small enough to be read at once.
_MOST_BYTES = 2**22
_ALWAYS = ("path", "line_text")
_HEAD = (
    "# Findings that this project accepts, each with its count per step.",
    "# Written by `torchtrim diagnose SCRIPT --update-allow`, which keeps every reason.",
)

Code = Annotated[str, Meta(pattern=r"^TT\d{3}$")]
Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0, le=2**31)]


class Entry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accepted finding: up to `count` of `code` a step on the lines that read `line_text`.

    `path` is relative to the project, with forward slashes. `line_text` is the line without the
    blanks around it, so that the entry holds when lines above come or go. An empty `function` is any.
    """

    code: Code
    path: Text
    function: Text = ""
    line_text: Text
    count: Count
    reason: Text = ""


class AllowList(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a project accepts."""

    schema_version: Literal[1] = 1
    allow: Annotated[tuple[Entry, ...], Meta(max_length=MOST_ENTRIES)] = ()


class Allowed(Struct, frozen=True, kw_only=True):
    """An entry of the allow-list and what it covered.

    Of the finding at `line`, `used` of the `count` that may be a step were there. An entry that
    nothing matches any more has `used` 0 and `line` 0.
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
class Over:
    """A limit that is passed, in words, and the findings that pass it, with what is over of each."""

    limit: str
    findings: tuple[Finding, ...] = ()


def load_allow(path: Path) -> AllowList:
    """Load an allow-list. Raises `UnreadableInput`, naming the field, for anything else."""
    return load_toml(
        path,
        AllowList,
        name="allow-list",
        most=_MOST_BYTES,
        newer="Update torchtrim.",
        mend="Mend that field; an entry has code, path, line_text and count, and may have function "
        "and reason.",
    )


def save_allow(entries: Iterable[Entry], path: Path) -> None:
    """Write an allow-list as TOML, whole or not at all."""
    write_atomically(path, allow_text(entries).encode())


def allow_text(entries: Iterable[Entry]) -> str:
    """The entries as TOML, for people to read, edit and commit."""
    lines = list(_HEAD)
    for entry in entries:
        lines += ["", "[[allow]]", *_fields(entry)]
    return "\n".join(lines) + "\n"


def _fields(entry: Entry) -> list[str]:
    fields = msgspec.structs.asdict(entry)
    kept = {n: v for n, v in fields.items() if v != "" or n in _ALWAYS}
    return [f"{name} = {_value(value)}" for name, value in kept.items()]


def _value(value: str | int) -> str:
    if isinstance(value, int):
        return str(value)
    whole = value.encode(errors="replace").decode()
    return msgspec.json.encode(whole).decode().replace("\x7f", "\\u007f")
