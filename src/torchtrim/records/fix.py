"""Fixes of a script's host-device syncs (applied, suggested, refused or reverted), and their writes."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from torchtrim.records.certificate import Certificate
from torchtrim.records.finding import Equivalence

State = Literal["applied", "suggested", "refused", "reverted"]


class FixRecord(Struct, frozen=True, kw_only=True):
    """One fix at one place. `line` refers to the original file; `diff` is relative to the previous round.

    `syncs_before` and `syncs_after` count the syncs per step at the rewritten place; the second is null if
    the fix was not run. `reason` says why the fix was not applied, and is empty if it was. `kinds` says for
    which kinds of input an applied fix holds, in addition to the run's.
    """

    name: str
    path: str
    line: int
    state: State
    equivalence: Equivalence
    syncs_before: Annotated[int, Meta(ge=0)] = 0
    syncs_after: Annotated[int, Meta(ge=0)] | None = None
    diff: str = ""
    reason: str = ""
    kinds: str = ""


class Fixes(Struct, frozen=True, kw_only=True):
    """All fixes of a script, the host-device syncs per step in user code, and the proof.

    `diff` has all applied fixes, relative to the project's folder; `written` is true if the files contain
    them. `certificate` compares the script with and without the diff; null if no fix was applied. `command`
    writes fixes that are not written.
    """

    places: tuple[FixRecord, ...]
    syncs_before: Annotated[int, Meta(ge=0)]
    syncs_after: Annotated[int, Meta(ge=0)]
    diff: str = ""
    written: bool = False
    certificate: Certificate | None = None
    command: str = ""


class FileWrite(Struct, frozen=True, kw_only=True):
    """The bytes of one file before and after a write. `path` is relative to the project's folder."""

    path: str
    before: bytes
    after: bytes


class SourceWrite(Struct, frozen=True, kw_only=True):
    """A write of one or more files, with a unique `key`.

    `undoes`: the write reverts another one, except for the files in `remaining`.
    """

    schema_version: Literal[1] = 1
    key: str
    when: str
    files: tuple[FileWrite, ...]
    undoes: bool = False
    remaining: tuple[FileWrite, ...] = ()
