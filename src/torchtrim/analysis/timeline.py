"""Bytes live at each operator of a step."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from torchtrim.memory.packing.buffers import bytes_over_time
from torchtrim.records.operator_names import module_paths, owner
from torchtrim.records.profile import KINDS, Profile, Storage
from torchtrim.records.remembered import remembered

WORKSPACE = "workspace"


class MemoryTimeline(NamedTuple):
    """Bytes per operator of the step.

    `live[i]`: live when operator `i` has ended. `high[i]`: the highest while it ran, the bytes live before it
    plus its own allocations; never below `live[i]`.
    """

    live: list[int]
    high: list[int]


class Sample(NamedTuple):
    """One column of a stacked chart: bytes by kind, `workspace` included, while `operator` ran."""

    operator: int
    by_kind: dict[str, int]


def timeline(profile: Profile) -> MemoryTimeline:
    """Return the bytes live after each operator and the highest bytes during it."""
    live, high = _live_and_high(profile)
    return MemoryTimeline(live.tolist(), high.tolist())


@remembered
def _live_and_high(profile: Profile) -> tuple[array[int], array[int]]:
    count = len(profile.operators)
    live = _alive(count, profile.storages)
    entering = _alive(count, profile.storages, late=1)
    high = (
        max(after, before + op.transient_bytes)
        for after, before, op in zip(live, entering, profile.operators, strict=True)
    )
    return array("q", live), array("q", high)


def peak_operator(profile: Profile) -> int:
    """Return the index of the first operator during which memory was highest, or -1."""
    high = timeline(profile).high
    return high.index(max(high)) if high else -1


def peak_without(profile: Profile, storages: Collection[int]) -> int:
    """Return the peak in bytes if these storages had never been allocated, to first order."""
    high = timeline(profile).high
    removed = _alive(len(high), (profile.storages[i] for i in storages))
    return max((max(a - b, 0) for a, b in zip(high, removed, strict=True)), default=0)


def alive(profile: Profile, operator: int) -> list[int]:
    """Return the indices of the storages live at the end of an operator; -1 is before the step."""
    return [i for i, s in enumerate(profile.storages) if s.birth <= operator < s.death]


def by_kind(profile: Profile, operator: int) -> dict[str, int]:
    """Return the bytes at an operator by storage kind; -1 is before the step.

    `workspace` holds the operator's allocations beyond its storages, so that the values add up to
    `timeline(profile).high[operator]`.
    """
    kinds: dict[str, int] = dict.fromkeys(KINDS, 0)
    for index in alive(profile, operator):
        kinds[profile.storages[index].kind] += profile.storages[index].counted
    kinds[WORKSPACE] = workspace(profile, operator)
    return kinds


def workspace(profile: Profile, operator: int) -> int:
    """Return the bytes that an operator allocated while it ran, beyond its storages."""
    if operator < 0:
        return 0
    live, high = timeline(profile)
    return high[operator] - live[operator]


def kinds_over_time(
    profile: Profile, points: int = 400, seconds: Sequence[float] = ()
) -> list[Sample]:
    """Return at most `points` samples in time order, the highest of each interval, so the peak is kept.

    Intervals have as many operators each or, with the `seconds` of each operator, are as long.
    """
    live, high = timeline(profile)
    columns: dict[str, list[int]] = {
        kind: _alive(len(high), (s for s in profile.storages if s.kind == kind)) for kind in KINDS
    }
    columns[WORKSPACE] = [top - after for top, after in zip(high, live, strict=True)]
    return [
        Sample(i, {kind: column[i] for kind, column in columns.items()})
        for i in (
            _highest_of_each_moment(high, points, seconds)
            if seconds
            else _highest_of_each_stretch(high, points)
        )
    ]


def _alive(count: int, storages: Iterable[Storage], late: int = 0) -> list[int]:
    """Return the bytes live at each of `count` operators, each storage from `late` after its birth."""
    return bytes_over_time(count, ((s.counted, s.birth + late, s.death) for s in storages))


def _highest_of_each_stretch(high: list[int], points: int) -> list[int]:
    count = len(high)
    stretches = min(max(points, 1), count)
    edges = [count * k // stretches for k in range(stretches + 1)] if count else []
    return [max(range(first, last), key=high.__getitem__) for first, last in pairwise(edges)]


def _highest_of_each_moment(high: list[int], points: int, seconds: Sequence[float]) -> list[int]:
    ends = list(accumulate(seconds))
    edges = [ends[-1] * k / points for k in range(1, points)]
    lasts = [bisect_left(ends, edge) for edge in edges] + [len(high) - 1]
    return [
        max(range(first, last + 1), key=high.__getitem__) for first, last in pairwise([0, *lasts])
    ]


def by_module(profile: Profile, at: int | None = None) -> dict[str, int]:
    """Return the bytes at the peak, or at operator `at`, by module path, largest first.

    They add up to the peak. A kernel's workspace belongs to its module. The batch and other tensors outside
    modules are under the empty path, optimizer state under the optimizer's name.
    """
    at = peak_operator(profile) if at is None else at
    modules = module_paths(profile)
    found: Counter[str] = Counter()
    for index in alive(profile, at):
        found[owner(profile, index, modules)] += profile.storages[index].counted
    if at >= 0:
        found[profile.module_of(at)] += workspace(profile, at)
    return {path: size for path, size in found.most_common() if size}


def most_of(profile: Profile, kind: str) -> int:
    """Return the most bytes of a kind that are live at once."""
    samples = kinds_over_time(profile, points=max(len(profile.operators), 1))
    before = sum(s.counted for s in profile.storages if s.kind == kind and s.birth < 0)
    return max((sample.by_kind[kind] for sample in samples), default=before)
