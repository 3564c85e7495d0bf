"""What tuning a loader found, in lines."""

from __future__ import annotations

from torchtrim.core.units import format_seconds
from torchtrim.records.loader import LoaderSettings, Tried
from torchtrim.records.report import Report


def tuned_lines(report: Report) -> list[str]:
    """The settings that were tried, the quickest first, those that were not, and the line to change."""
    found = report.tuned
    if found is None:
        return []
    tuning = found.tuning
    lines = [f"change {found.change}" if tuning.chosen != tuning.before else "nothing to change"]
    if tuning.path:
        lines[0] += f", at {tuning.path}:{tuning.line}"
    if tuning.source == "modelled":
        lines.append(f"modelled for {tuning.cores} cores from measurements here; measure it there")
    lines += map(_tried, sorted(tuning.tried, key=lambda one: one.seconds))
    return [*lines, *(f"not tried: {one}" for one in tuning.skipped)]


def tuned_sentence(report: Report) -> str:
    """The sentence of a report on a loader."""
    assert report.tuned is not None
    tuning = report.tuned.tuning
    if tuning.chosen == tuning.before:
        return f"The loader stays: {format_seconds(tuning.before_seconds)} a batch, nothing quicker found"
    before, after = tuning.before_seconds, tuning.after_seconds
    predicted = " modelled" if tuning.source == "modelled" else ""
    return (
        f"Loader: {format_seconds(before)} -> {format_seconds(after)}{predicted} a batch with its step, "
        f"{before / max(after, 1e-9):.1f} times as fast"
    )


def _tried(one: Tried) -> str:
    return f"{format_seconds(one.seconds)} a batch: {said_of(one.settings)} ({one.batches} batches)"


def said_of(settings: LoaderSettings) -> str:
    """Settings in words."""
    whole = ", each batch fetched as a whole" if settings.whole else ""
    if not settings.workers:
        return f"no workers{whole}"
    plural = "s" * (settings.workers != 1)
    return f"{settings.workers} worker{plural}, {settings.prefetch} ahead of each{whole}"
