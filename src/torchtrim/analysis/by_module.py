"""Whose the bytes at the peak are: each storage's module, or the one whose operator made it."""

from __future__ import annotations

from collections import Counter

from torchtrim.analysis.timeline import alive, kinds_over_time, peak_operator, workspace
from torchtrim.records.operator_names import module_paths, owner
from torchtrim.records.profile import Profile


def by_module(profile: Profile, at: int | None = None) -> dict[str, int]:
    """Bytes at the peak, or at operator `at`, by module path, largest first.

    They add up to the peak. The workspace of a kernel is its module's; what belongs to no module, such
    as the batch, is under the empty path, and the states of an optimizer under its name.
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
    """The most bytes of a kind that are alive at once."""
    samples = kinds_over_time(profile, points=max(len(profile.operators), 1))
    before = sum(s.counted for s in profile.storages if s.kind == kind and s.birth < 0)
    return max((sample.by_kind[kind] for sample in samples), default=before)
