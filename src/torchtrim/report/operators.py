"""The operators of a step as a table: those of one name, phase and line together, longest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchtrim.records import Profile
from torchtrim.records.operator_names import base_name
from torchtrim.report import facts
from torchtrim.report.lanes import Lanes
from torchtrim.report.safe import clean, keep_right

_MOST_CHARACTERS = 60


@dataclass(frozen=True, kw_only=True)
class OperatorRow:
    """Operators of one name, phase and line. `made_bytes`: of the tensors that they made."""

    name: str
    phase: str
    place: str
    count: int
    seconds: float
    share: float
    made_bytes: int
    waits: int


@dataclass(frozen=True, kw_only=True)
class OperatorTable:
    """The longest rows; how many rows and which share of the time were left out."""

    rows: Sequence[OperatorRow]
    dropped: int
    dropped_share: float
    heading: str


@dataclass(slots=True)
class _Sum:
    count: int = 0
    seconds: float = 0.0
    made: int = 0
    waits: int = 0


_Key = tuple[str, str, int]


def operator_table(profile: Profile, lanes: Lanes, most: int, *, source: bool) -> OperatorTable:
    """At most `most` rows. Without `source` no line is named, and lines are not distinguished."""
    sums, key_of = _sums(profile, source)
    on_device = lanes.source == "modelled"
    for span in lanes.device if on_device else lanes.host:
        sums[key_of[span.index]].seconds += span.seconds
    ordered = sorted(sums.items(), key=lambda item: (-item[1].seconds, -item[1].count, item[0]))
    whole = sum(one.seconds for one in sums.values()) or 1.0
    rows = [_row(profile, key, one, whole) for key, one in ordered[:most]]
    return OperatorTable(
        rows=rows,
        dropped=max(len(ordered) - most, 0),
        dropped_share=100 * sum(one.seconds for _, one in ordered[most:]) / whole,
        heading="device, modelled" if on_device else "time",
    )


def _sums(profile: Profile, source: bool) -> tuple[dict[_Key, _Sum], list[_Key]]:
    sums: dict[_Key, _Sum] = {}
    keys: list[_Key] = []
    for op in profile.operators:
        place = op.caller if op.caller >= 0 else op.place
        key = (op.name, op.phase, place if source else -1)
        keys.append(key)
        sums.setdefault(key, _Sum()).count += 1
    for storage in profile.storages:
        if 0 <= storage.birth < len(keys):
            sums[keys[storage.birth]].made += storage.counted
    for sync in profile.syncs:
        if sync.operator >= 0:
            sums[keys[sync.operator]].waits += 1
    return sums, keys


def _row(profile: Profile, key: _Key, one: _Sum, whole: float) -> OperatorRow:
    name, phase, number = key
    place = profile.places[number] if number >= 0 else None
    where = facts.place(place.path, place.line, facts.home(profile)) if place else ""
    return OperatorRow(
        name=keep_right(clean(base_name(name).removeprefix("aten::")), _MOST_CHARACTERS),
        phase=phase,
        place=keep_right(clean(where), _MOST_CHARACTERS),
        count=one.count,
        seconds=one.seconds,
        share=100 * one.seconds / whole,
        made_bytes=one.made,
        waits=one.waits,
    )
