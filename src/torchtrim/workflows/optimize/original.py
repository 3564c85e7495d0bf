"""The original's trial: its longest step is recorded and planned for, with the overheads of this machine."""

from __future__ import annotations

from msgspec.structs import replace

from torchtrim.core.units import format_bytes
from torchtrim.executor.overheads import overheads
from torchtrim.records.trial import Request, Trial

_DIFFERS = 1.02
"""Peaks of steps that are alike differ by less: by what a logger keeps, or an allocator rounds."""


def longest_step(trial: Trial) -> int | None:
    """The step with the highest peak, where that is not the recorded one and clearly higher."""
    peaks = _peaks(trial)
    if trial.recorded not in peaks:
        return None
    longest = max(peaks, key=peaks.__getitem__)
    return longest if peaks[longest] > _DIFFERS * peaks[trial.recorded] else None


def recording(request: Request, step: int) -> Request:
    """The request that records that step; as many are run, and one to be timed at least."""
    return replace(request, warmup=step, steps=max(request.total - step - 1, 1))


def uneven_note(trial: Trial) -> str:
    """The note about it."""
    peaks = [peak for peak in _peaks(trial).values() if peak]
    return (
        f"the steps differ in length: peaks from {format_bytes(min(peaks))} to "
        f"{format_bytes(max(peaks))} in {len(peaks)} steps. Planned for the longest seen; the budget is on "
        "the highest of all, and a longer one may still come"
    )


def _peaks(trial: Trial) -> dict[int, int]:
    """Peaks of the measured steps, by number."""
    first = trial.request.warmup
    return {first + n: step.peak_bytes for n, step in enumerate(trial.steps[first:])}


def with_overheads(trial: Trial) -> Trial:
    """The trial with what running again takes besides on this machine, where that is what takes the time."""
    if trial.profile is None or not trial.profile.device.startswith("cpu"):
        return trial
    profile = replace(trial.profile, overheads=overheads())
    return replace(trial, profile=profile)
