"""Contents of an estimate, and the search for the largest length that fits a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple

from torchtrim.analysis.timeline import by_module, most_of
from torchtrim.executor.registry import names
from torchtrim.planner.planner import Planner
from torchtrim.planner.plans import where_of
from torchtrim.records.budget import Budget
from torchtrim.records.estimate import EstimateReport, ModuleBytes
from torchtrim.records.profile import Profile

_LONGEST = 2**30  # No length above it is tried: far longer than any batch or sequence in use.
# Block sizes: programs often pad lengths to a multiple, or use another kernel for one.
_BLOCKS = (2, 8, 16, 32, 64, 128, 256)
_RESTARTS = 3  # Arbitrary; each dip of the peak costs a handful of dry runs to find.
_LEAST_SAVING = 0.01  # Arbitrary; a hundredth of the peak is within an estimate's error.


class LargestLength(NamedTuple):
    """The largest length found to fit, or 0. `peak`: its peak. `next_peak`: the peak of the next length.

    A peak is None if the length does not run. `tried`: the longest. `falls`: some longer length needs less.
    """

    length: int
    peak: int | None
    next_peak: int | None
    tried: int
    falls: bool


def largest_length(
    peak_of: Callable[[int], int | None],
    budget: int,
    now: int,
    known: Mapping[int, int | None] | None = None,
) -> LargestLength:
    """Return the largest length whose peak is within the budget, and the peak of the next length.

    `peak_of` returns the peak in bytes at a length, or None if it does not run. It is called only a few times
    if the peak grows nearly in proportion, and never for `known` lengths. A length that does not run although
    a longer one does is too short: batch norm in training takes no batch of one. If the peak falls somewhere
    as the length grows, the result fits, the next length does not, and other longer ones may fit.
    """
    peaks = dict(known or {})
    if now not in peaks:
        peaks[now] = peak_of(now)
    low = _within(peak_of, budget, peaks)
    for _ in range(_RESTARTS):
        if not _longer_fits(peak_of, budget, low, peaks):
            break
        low = _within(peak_of, budget, peaks)
    rising = [peak for _, peak in sorted(peaks.items()) if peak is not None]
    falls = any(shorter > longer for shorter, longer in pairwise(rising))
    return LargestLength(
        low if peaks.get(low) else 0, peaks.get(low), peaks.get(low + 1), max(peaks), falls
    )


def _within(peak_of: Callable[[int], int | None], budget: int, peaks: dict[int, int | None]) -> int:
    """Return a length that fits, or is too short to run, while the next one does not fit."""
    low = max((length for length in peaks if _is_low(peaks, length, budget)), default=0)
    high = min((length for length in peaks if length > low), default=_LONGEST + 1)
    while high - low > 1:
        tried = _next_length(peaks, low, high, budget)
        peaks[tried] = peak_of(tried)
        low, high = (tried, high) if _is_low(peaks, tried, budget) else (low, tried)
    return low


def _is_low(peaks: dict[int, int | None], length: int, budget: int) -> bool:
    peak = peaks[length]
    if peak is None:
        running = [n for n, other in peaks.items() if other is not None]
        return bool(running) and length < min(running)
    return peak <= budget


def _longer_fits(
    peak_of: Callable[[int], int | None], budget: int, low: int, peaks: dict[int, int | None]
) -> bool:
    """Return True if a length fits although a shorter one does not.

    Programs pad to whole blocks or switch kernels there; at two or four times a length, some begin to chunk.
    """
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


def _next_length(peaks: dict[int, int | None], low: int, high: int, budget: int) -> int:
    """Return the next length to try: where a line through two known ones crosses the budget.

    The line alternates between the two lengths that enclose the budget and the two nearest. Every fourth try
    is the middle, which bounds the cost of an irregular curve.
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
    running = (known for known, peak in peaks.items() if peak is not None)
    return sorted(running, key=lambda known: abs(known - length))[:2]


def _crossing(peaks: dict[int, int | None], through: list[int], budget: int) -> int | None:
    """Return where the line through two lengths meets the budget, or None if it falls."""
    if len(through) < 2:
        return None
    first, second = through
    peak = peaks[first] or 0
    slope = ((peaks[second] or 0) - peak) / (second - first)
    return int(first + (budget - peak) / slope) if slope > 0 else None


def estimate_of(profile: Profile) -> EstimateReport:
    """Return the estimate of a profile."""
    smallest, places = _recomputed(profile)
    return EstimateReport(
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
    """Return True if an operator of the step reads an input of `count` samples."""
    return any(
        use.shape[:1] == (count,) and profile.storages[use.storage].kind == "input"
        for op in profile.operators
        for use in op.inputs
    )


def unused_bytes(profile: Profile) -> int:
    """Return the bytes of tensors older than the step that no operator, model or optimizer of it uses."""
    used = {use.storage for op in profile.operators for use in (*op.inputs, *op.outputs)}
    return sum(
        storage.counted
        for number, storage in enumerate(profile.storages)
        if storage.birth < 0 and storage.kind == "input" and number not in used
    )


def _recomputed(profile: Profile) -> tuple[int | None, tuple[str, ...]]:
    """Return the smallest peak that recomputation reaches, or None if it saves little, and its places."""
    if not any(op.phase == "backward" for op in profile.operators):
        return None, ()
    others = {*names()} - {"recompute"}
    planner = Planner(profile, step_seconds=profile.step_seconds, fingerprint={}, exclude=others)
    bias = profile.peak_bytes - planner.simulated_original
    plan = planner.floor_plan(Budget(0, bias=bias))
    peak = plan.predicted.peak_bytes
    if peak > (1 - _LEAST_SAVING) * profile.peak_bytes:
        return None, ()
    return peak, tuple(where_of(plan.techniques))
