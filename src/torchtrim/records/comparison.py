"""A comparison: what changed from one report or profile to another, and if that is more than its spread."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from torchtrim.errors import UnreadableInput
from torchtrim.records.files import (
    MOST_BYTES,
    decode,
    load_profile,
    read_bounded,
    without_collection,
)
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.records.report import Report

Unit = Literal["bytes", "seconds", "count"]
Judged = Literal["less", "more", "no significant change", "unknown"]


class Side(Struct, frozen=True, kw_only=True):
    """One of the two that are compared: where it came from and what it was measured on."""

    path: str
    kind: Literal["report", "profile"]
    script: str
    project: str
    device: str
    torch: str
    torchtrim: str
    steps: int


class Change(Struct, frozen=True, kw_only=True):
    """One figure before and after, None where a side does not have it.

    `spread` is how far apart the two may be by chance, None where nobody measured that. `judged` is
    "unknown" where a side lacks the figure, or where it varies and was measured once.
    """

    name: str
    unit: Unit
    before: float | None
    after: float | None
    spread: float | None
    judged: Judged


class FindingChange(Struct, frozen=True, kw_only=True):
    """A finding that came, went, or is on both sides. `kept` findings may have moved to another line."""

    change: Literal["new", "gone", "kept"]
    finding: Finding
    before: Finding | None = None


class Comparison(Struct, frozen=True, kw_only=True):
    """What changed from `before` to `after`. `over` are the limits that the change passes."""

    schema_version: Literal[1] = 1
    torchtrim: str
    before: Side
    after: Side
    changes: tuple[Change, ...]
    by_kind: tuple[Change, ...]
    findings: tuple[FindingChange, ...]
    notes: tuple[str, ...] = ()
    over: tuple[str, ...] = ()


class Record(Struct):
    """What tells a report from a profile."""

    verb: str | None = None
    operators: msgspec.Raw = msgspec.Raw()


def load_report_or_profile(path: Path) -> Report | Profile:
    """Load what `--json`, report.json or profile.json hold. Raises `UnreadableInput` for anything else."""
    with without_collection():
        return _load(path)


def _load(path: Path) -> Report | Profile:
    data = read_bounded(path, MOST_BYTES)
    peek = decode(data, Record, str(path))
    if bytes(peek.operators):
        del data
        return load_profile(path)
    if peek.verb is None:
        raise UnreadableInput(
            f"{path} is neither a report nor a profile: it has no `verb` and no `operators`. "
            "Give report.json or profile.json of torchtrim-out, or what --json printed."
        )
    return decode(data, Report, str(path))


def schema() -> dict[str, object]:
    """JSON Schema of `compare --json`."""
    return msgspec.json.schema(Comparison)
