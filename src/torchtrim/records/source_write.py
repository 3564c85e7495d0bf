"""What was last written into the user's source, so that it can be taken out again."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class FileWrite(Struct, frozen=True, kw_only=True):
    """One file's bytes before and after. `path` is relative to the project's folder."""

    path: str
    before: bytes
    after: bytes


class SourceWrite(Struct, frozen=True, kw_only=True):
    """A write of one or more files. `key` is new for each.

    `undoes`: it takes out another write, of which `remaining` stay in place.
    """

    schema_version: Literal[1] = 1
    key: str
    when: str
    files: tuple[FileWrite, ...]
    undoes: bool = False
    remaining: tuple[FileWrite, ...] = ()
