"""How many bytes are alive at each operator of a step."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable
from itertools import pairwise
from typing import NamedTuple

from torchtrim.memory.curve import bytes_over_time
from torchtrim.records.profile import KINDS, Profile, Storage
from torchtrim.records.remembered import remembered

WORKSPACE = "workspace"


class Timeline(NamedTuple):
    """Bytes per operator of the step.

    `live[i]`: alive when operator `i` has ended. `high[i]`: the highest while it ran, which is what
    was alive going into it and what the operator itself allocated; never below `live[i]`.
    """

    live: list[int]
    high: list[int]


class Sample(NamedTuple):
    """One column of a stacked picture: bytes by kind, and `workspace`, while `operator` ran."""

    operator: int
    by_kind: dict[str, int]


def timeline(profile: Profile) -> Timeline:
    """Bytes alive after and the highest bytes during each operator."""
    live, high = _live_and_high(profile)
    return Timeline(live.tolist(), high.tolist())


@remembered
def _live_and_high(profile: Profile) -> tuple[array[int], array[int]]:
    count = len(profile.operators)
    live = _alive(count, profile.storages)
    entering = _alive(count, profile.storages, late=1)
    high = array(
        "q",
        (
            max(after, before + op.transient_bytes)
            for after, before, op in zip(live, entering, profile.operators, strict=True)
        ),
    )
    return array("q", live), high


def peak_operator(profile: Profile) -> int:
    """Index of the first operator during which memory was highest; -1 where there are none."""
    high = timeline(profile).high
    return high.index(max(high)) if high else -1


def peak_without(profile: Profile, storages: Collection[int]) -> int:
    """Peak in bytes of the same step if these storages had never been allocated, to first order."""
    high = timeline(profile).high
    removed = _alive(len(high), (profile.storages[i] for i in storages))
    return max((max(a - b, 0) for a, b in zip(high, removed, strict=True)), default=0)


def alive(profile: Profile, operator: int) -> list[int]:
    """Indices of the storages alive at the end of an operator; -1 for before the step."""
    return [i for i, s in enumerate(profile.storages) if s.birth <= operator < s.death]


def by_kind(profile: Profile, operator: int) -> dict[str, int]:
    """Bytes at an operator by storage kind; -1 for before the step.

    `workspace` is what the operator allocated and no storage accounts for, so that the values add
    up to `timeline(profile).high[operator]`.
    """
    kinds: dict[str, int] = dict.fromkeys(KINDS, 0)
    for index in alive(profile, operator):
        kinds[profile.storages[index].kind] += profile.storages[index].counted
    kinds[WORKSPACE] = workspace(profile, operator)
    return kinds


def workspace(profile: Profile, operator: int) -> int:
    """Bytes that an operator allocated while it ran and that no storage accounts for."""
    if operator < 0:
        return 0
    live, high = timeline(profile)
    return high[operator] - live[operator]


def kinds_over_time(profile: Profile, points: int = 400) -> list[Sample]:
    """At most `points` samples in time order, each the highest of its stretch: the peak is kept."""
    live, high = timeline(profile)
    columns: dict[str, list[int]] = {
        kind: _alive(len(high), (s for s in profile.storages if s.kind == kind)) for kind in KINDS
    }
    columns[WORKSPACE] = [top - after for top, after in zip(high, live, strict=True)]
    return [
        Sample(i, {kind: column[i] for kind, column in columns.items()})
        for i in _highest_of_each_stretch(high, points)
    ]


def _alive(count: int, storages: Iterable[Storage], late: int = 0) -> list[int]:
    """Bytes alive at each of `count` operators, each storage from `late` after its birth."""
    return bytes_over_time(count, ((s.counted, s.birth + late, s.death) for s in storages))


def _highest_of_each_stretch(high: list[int], points: int) -> list[int]:
    count = len(high)
    stretches = min(max(points, 1), count)
    edges = [count * k // stretches for k in range(stretches + 1)] if count else []
    return [max(range(first, last), key=high.__getitem__) for first, last in pairwise(edges)]
