"""A comparison of two reports or profiles: what changed, and whether the change exceeds its spread."""

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
Judgement = Literal["less", "more", "no significant change", "unknown"]


class Side(Struct, frozen=True, kw_only=True):
    """One side of a comparison: its file, program, device and versions."""

    path: str
    kind: Literal["report", "profile"]
    script: str
    project: str
    device: str
    torch: str
    torchtrim: str
    steps: int


class Change(Struct, frozen=True, kw_only=True):
    """One figure before and after; None if a side lacks it.

    `spread` is how far apart the two may be by chance, None if not measured. `judged` is "unknown" if a side
    lacks the figure, or if the figure varies and was measured only once.
    """

    name: str
    unit: Unit
    before: float | None
    after: float | None
    spread: float | None
    judged: Judgement


class FindingChange(Struct, frozen=True, kw_only=True):
    """A finding that is new, gone, or on both sides. `kept` findings may have moved to another line."""

    change: Literal["new", "gone", "kept"]
    finding: Finding
    before: Finding | None = None


class Comparison(Struct, frozen=True, kw_only=True):
    """Changes from `before` to `after`. `over`: the limits that the changes exceed."""

    schema_version: Literal[1] = 1
    torchtrim: str
    before: Side
    after: Side
    changes: tuple[Change, ...]
    by_kind: tuple[Change, ...]
    findings: tuple[FindingChange, ...]
    notes: tuple[str, ...] = ()
    over: tuple[str, ...] = ()


class _ReportOrProfile(Struct):
    """Fields that distinguish a report from a profile."""

    verb: str | None = None
    operators: msgspec.Raw = msgspec.Raw()


def load_report_or_profile(path: Path) -> Report | Profile:
    """Load report.json, profile.json or the output of `--json`. Raises `UnreadableInput` for other files."""
    with without_collection():
        return _load(path)


def _load(path: Path) -> Report | Profile:
    data = read_bounded(path, MOST_BYTES)
    peek = decode(data, _ReportOrProfile, str(path), name="report or profile")
    if bytes(peek.operators):
        del data
        return load_profile(path)
    if peek.verb is None:
        raise UnreadableInput(
            f"{path} is neither a report nor a profile: it has no `verb` and no `operators`. "
            "Pass report.json or profile.json from torchtrim-out, or the output of --json."
        )
    return decode(data, Report, str(path))
