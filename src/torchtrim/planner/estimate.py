"""What an estimated profile says of a step, and how far a length can grow until a budget is full."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple

from torchtrim.analysis.by_module import by_module, most_of
from torchtrim.planner.planner import Planner
from torchtrim.planner.plans import where_of
from torchtrim.records.budget import Budget
from torchtrim.records.estimate import Estimated, ModuleBytes
from torchtrim.records.profile import Profile

_LONGEST = 2**30
_BLOCKS = (2, 8, 16, 32, 64, 128, 256)
_RESTARTS = 3  # Arbitrary; each dip of the peak that is found costs a handful of dry runs.
_LEAST_SAVING = 0.01  # Arbitrary; a hundredth of the peak is within an estimate's error.


class LargestLength(NamedTuple):
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


def largest(
    peak_of: Callable[[int], int | None],
    budget: int,
    now: int,
    known: Mapping[int, int | None] | None = None,
) -> LargestLength:
    """The largest length whose peak is within the budget, and what one more would need.

    `peak_of` tells the peak in bytes at a length, None where there is none; it is called a few times only
    where that grows nearly in proportion, and not for lengths whose peak is `known`. A length that does not
    run although a longer one does is too short: batch norm in training takes no batch of one. Where the peak
    falls somewhere as the length grows, what is given fits and one more does not, and a few longer ones were
    tried in vain; others may fit.
    """
    peaks = dict(known or {})
    if now not in peaks:
        peaks[now] = peak_of(now)
    low = _within(peak_of, budget, peaks)
    for _ in range(_RESTARTS):
        if not _longer_fits(peak_of, budget, low, peaks):
            break
        low = _within(peak_of, budget, peaks)
    told = [peaks[length] or 0 for length in sorted(peaks) if peaks[length] is not None]
    falls = any(one > other for one, other in pairwise(told))
    return LargestLength(
        low if peaks.get(low) else 0, peaks.get(low), peaks.get(low + 1), max(peaks), falls
    )


def _within(peak_of: Callable[[int], int | None], budget: int, peaks: dict[int, int | None]) -> int:
    """A length that fits while one more does not, or that is too short to run: the largest that is known to
    or a longer one."""
    low, high = _bracket(peaks, budget)
    while high - low > 1:
        tried = _next(peaks, low, high, budget)
        peaks[tried] = peak_of(tried)
        low, high = (tried, high) if _is_low(peaks, tried, budget) else (low, tried)
    return low


def _bracket(peaks: dict[int, int | None], budget: int) -> tuple[int, int]:
    """The largest length that is known to fit, and the next that is known not to."""
    low = max((length for length in peaks if _is_low(peaks, length, budget)), default=0)
    return low, min((length for length in peaks if length > low), default=_LONGEST + 1)


def _is_low(peaks: dict[int, int | None], length: int, budget: int) -> bool:
    """Whether it fits, or is too short to run."""
    peak = peaks[length]
    if peak is None:
        running = [n for n, other in peaks.items() if other is not None]
        return bool(running) and length < min(running)
    return peak <= budget


def _longer_fits(
    peak_of: Callable[[int], int | None], budget: int, low: int, peaks: dict[int, int | None]
) -> bool:
    """Whether a length fits although a shorter one does not: whole blocks, where programs pad or take a
    kernel of their own, or twice and four times as long, where they begin to work in parts."""
    blocks = (-(-(low + 2) // size) * size for size in _BLOCKS)
    for length in dict.fromkeys((*blocks, 2 * low, 4 * low)):
        if not low < length <= _LONGEST:
            continue
        if length not in peaks:
            peaks[length] = peak_of(length)
        peak = peaks[length]
        if peak is None or peak <= budget:
            return peak is not None
    return False


def _next(peaks: dict[int, int | None], low: int, high: int, budget: int) -> int:
    """The length to try: where a line through two that are known crosses the budget.

    By turns through the two that enclose it and the two nearest. Every fourth time it is the middle, so that
    a crooked line costs no more than a few times as much.
    """
    turn = len(peaks) % 4
    if high > _LONGEST:
        aim = _crossing(peaks, _nearest(peaks, low), budget)
        aim = 2 * low if aim is None else min(aim, 16 * low)
    elif peaks[high] is None or turn == 0:
        aim = None
    elif turn % 2 and peaks.get(low) is not None:
        aim = _crossing(peaks, [low, high], budget)
    else:
        aim = _crossing(peaks, _nearest(peaks, low), budget)
    return max(low + 1, min((low + high) // 2 if aim is None else aim, high - 1))


def _nearest(peaks: dict[int, int | None], length: int) -> list[int]:
    """The two lengths nearest to it that run."""
    running = (one for one, peak in peaks.items() if peak is not None)
    return sorted(running, key=lambda one: abs(one - length))[:2]


def _crossing(peaks: dict[int, int | None], through: list[int], budget: int) -> int | None:
    """Where the line through two lengths reaches the budget; None without a slope."""
    if len(through) < 2:
        return None
    one, other = through
    at_one, at_other = peaks[one] or 0, peaks[other] or 0
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


def has_samples(profile: Profile, count: int) -> bool:
    """Whether an operator of the step reads an input with so many samples."""
    return any(
        use.shape[:1] == (count,) and profile.storages[use.storage].kind == "input"
        for op in profile.operators
        for use in op.inputs
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
    plan = planner.floor_plan(Budget(0, bias=bias))
    peak = plan.predicted.peak_bytes
    if peak > (1 - _LEAST_SAVING) * profile.peak_bytes:
        return None, ()
    return peak, tuple(where_of(plan.techniques))
