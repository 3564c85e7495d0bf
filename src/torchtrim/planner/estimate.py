"""What an estimated profile says of a step, and how far a length can grow until a budget is full."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from torchtrim.memory.by_module import by_module, most_of
from torchtrim.planner.planner import Planner, where_of
from torchtrim.records.estimate import Estimated, ModuleBytes
from torchtrim.records.profile import Profile

_LONGEST = 2**30
_BLOCKS = (8, 64)
_RESTARTS = 3
_LEAST_SAVING = 0.01


class Largest(NamedTuple):
    """The largest length that was found to fit: 0 for none. `peak` is what it needs, `next_peak` what one
    more would.

    None where there is none, or where one more cannot be. `tried` is the longest length that was tried;
    `falls` says that a longer one was seen to need less than a shorter one.
    """

    length: int
    peak: int | None
    next_peak: int | None
    tried: int
    falls: bool


def largest(peak_of: Callable[[int], int | None], budget: int, now: int) -> Largest:
    """The largest length whose peak is within the budget, and what one more would need.

    `peak_of` tells the peak in bytes at a length, None where there is none; it is called a few times only
    where that grows nearly in proportion. A length that does not run although a longer one does is too
    short: batch norm in training takes no batch of one. Where the peak falls somewhere as the length grows,
    what is given fits and one more does not, and a few longer ones were tried in vain; others may fit.
    """
    peaks: dict[int, int | None] = {}
    low = _within(peak_of, budget, now, peaks)
    for _ in range(_RESTARTS):
        longer = _longer(peak_of, budget, low, peaks)
        if longer is None:
            break
        low = _within(peak_of, budget, longer, peaks)
    known = [peaks[length] or 0 for length in sorted(peaks) if peaks[length] is not None]
    falls = any(one > other for one, other in pairwise(known))
    return Largest(
        low if peaks.get(low) else 0, peaks.get(low), peaks.get(low + 1), max(peaks), falls
    )


def _within(
    peak_of: Callable[[int], int | None], budget: int, now: int, peaks: dict[int, int | None]
) -> int:
    """A length that fits while one more does not, or that is too short to run, found from `now` on."""
    low, high, tried = 0, _LONGEST + 1, now
    while high - low > 1:
        if tried not in peaks:
            peaks[tried] = peak_of(tried)
        peak = peaks[tried]
        too_short = peak is None and any(p is not None and n > tried for n, p in peaks.items())
        if too_short or (peak is not None and peak <= budget):
            low = tried
        else:
            high = tried
        tried = _next(peaks, low, high, budget)
    return low


def _longer(
    peak_of: Callable[[int], int | None], budget: int, low: int, peaks: dict[int, int | None]
) -> int | None:
    """A length that fits although a shorter one does not: whole blocks, where programs pad, or twice and
    four times as long, where they begin to work in parts."""
    blocks = (-(-(low + 1) // size) * size for size in _BLOCKS)
    for length in (*blocks, 2 * low, 4 * low):
        if not low < length <= _LONGEST:
            continue
        if length not in peaks:
            peaks[length] = peak_of(length)
        peak = peaks[length]
        if peak is None or peak <= budget:
            return length if peak is not None else None
    return None


def _next(peaks: dict[int, int | None], low: int, high: int, budget: int) -> int:
    """The length to try: where the line through the two nearest ones crosses the budget.

    Every fourth time it is the middle, so that a crooked line costs no more than a few times as much.
    """
    crossing = _crossing(peaks, low, budget)
    if high > _LONGEST:
        aim = 2 * low if crossing is None else min(crossing, 16 * low)
    elif crossing is None or peaks[high] is None or len(peaks) % 4 == 0:
        aim = (low + high) // 2
    else:
        aim = crossing
    return max(low + 1, min(aim, high - 1))


def _crossing(peaks: dict[int, int | None], low: int, budget: int) -> int | None:
    """Where the line through the two lengths nearest to `low` reaches the budget; None without a slope."""
    known = [(length, peak) for length, peak in peaks.items() if peak is not None]
    nearest = sorted(known, key=lambda pair: abs(pair[0] - low))[:2]
    if len(nearest) < 2:
        return None
    (one, at_one), (other, at_other) = nearest
    slope = (at_other - at_one) / (other - one)
    return int(one + (budget - at_one) / slope) if slope > 0 else None


def estimated(profile: Profile) -> Estimated:
    """What an estimate says of a profile."""
    smallest, places = _recomputed(profile)
    return Estimated(
        parameter_bytes=most_of(profile, "parameter"),
        gradient_bytes=most_of(profile, "gradient"),
        optimizer_bytes=most_of(profile, "optimizer_state"),
        unused_bytes=unused_bytes(profile),
        modules=tuple(
            ModuleBytes(path=path, bytes=size) for path, size in by_module(profile).items()
        ),
        recomputed_bytes=smallest,
        recomputed=places,
    )


def unused_bytes(profile: Profile) -> int:
    """Bytes that were alive before the step, that nothing in it reads and that are no model's or
    optimizer's of it: what else the process keeps."""
    used = {use.storage for op in profile.operators for use in (*op.inputs, *op.outputs)}
    return sum(
        storage.counted
        for number, storage in enumerate(profile.storages)
        if storage.birth < 0 and storage.kind == "input" and number not in used
    )


def _recomputed(profile: Profile) -> tuple[int | None, tuple[str, ...]]:
    """The smallest peak that recomputation would reach, and where; None where it saves too little."""
    if not any(op.phase == "backward" for op in profile.operators):
        return None, ()
    planner = Planner(
        profile, step_seconds=profile.step_seconds, fingerprint={}, exclude=("overwrite",)
    )
    bias = profile.peak_bytes - planner.simulated_original
    plan = planner.floor_plan(0, bias=bias)
    peak = plan.predicted.peak_bytes
    if peak > (1 - _LEAST_SAVING) * profile.peak_bytes:
        return None, ()
    return peak, tuple(where_of(plan.techniques))
