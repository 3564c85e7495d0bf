"""Saved activations: what forward made and keeps for backward."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

from torchtrim.analysis.timeline import alive, peak_operator
from torchtrim.analysis.why_live import kept_for_backward, last_reads
from torchtrim.records.profile import Call, Profile, Storage


def saved_storages(profile: Profile, at: int | None = None) -> list[int]:
    """Storages alive at an operator (the peak where None) that forward keeps for backward.

    In order of birth. Parameters, inputs and what was alive before the step are not among them.
    """
    at = peak_operator(profile) if at is None else at
    candidates = [i for i in alive(profile, at) if _computed_in_step(profile.storages[i])]
    reads = last_reads(profile, candidates)
    kept = (i for i in candidates if kept_for_backward(profile, i, at, reads[i]))
    return sorted(kept, key=lambda i: profile.storages[i].birth)


def saved_by_module(profile: Profile, at: int | None = None) -> dict[str, int]:
    """Bytes of saved activations by path of the module whose operator made them, largest first."""
    totals: Counter[str] = Counter()
    for index in saved_storages(profile, at):
        storage = profile.storages[index]
        totals[profile.module_of(storage.birth)] += storage.counted
    return dict(totals.most_common())


def released_by_recompute(
    profile: Profile, calls: Iterable[Call], at: int | None = None
) -> list[int]:
    """Bytes that each call would not hold at the peak if backward recomputed it.

    These are the saved activations made inside the call, less its inputs and outputs, which stay.
    """
    saved = saved_storages(profile, at)
    births = [profile.storages[i].birth for i in saved]
    released = []
    for call in calls:
        inside = saved[bisect_left(births, call.first) : bisect_left(births, call.last)]
        stays = {*call.inputs, *call.outputs}
        released.append(sum(profile.storages[i].counted for i in inside if i not in stays))
    return released


def _computed_in_step(storage: Storage) -> bool:
    return storage.birth >= 0 and storage.kind in ("activation", "temporary")
