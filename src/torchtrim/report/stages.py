"""Renders a pipeline: its stages in words and as a table, its schedule as coloured bars."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from torchtrim.core.units import format_bytes, format_seconds
from torchtrim.records.pipeline import Bar, PipelineReport, Stage

_WIDTH, _HEIGHT, _GAP = 1000.0, 26, 4  # Arbitrary; the picture stretches to the width of the page.
_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward to the inputs",
    "W": "backward to the weights",
}
_SHADES = {"F": "forward", "B": "backward", "I": "backward", "W": "recompute"}
_NARROWEST = 13.0  # Arbitrary; the width of two digits.


def lines(found: PipelineReport) -> list[str]:
    """Return a line on the whole pipeline and one for each stage."""
    one = found.pipeline
    replicas = f" x {one.replicas} replicas" if one.replicas > 1 else ""
    count = len(one.cuts) + 1
    return [
        f"{one.schedule}: {count} stages on {one.ranks} ranks{replicas}, {one.microbatches} micro-batches, "
        f"bubble {100 * one.bubble:.0f} %",
        *map(_line, one.stages, rows(found)),
    ]


def _line(stage: Stage, row: tuple[str, ...]) -> str:
    number, rank, first, forward, backward, held, flight, _, peak = row
    return (
        f"stage {number.partition(' ')[0]} on rank {rank}, from {first}: {forward} + {backward}, "
        f"{held} x {flight} in flight{', recomputes' * stage.recompute}; its rank's peak {peak}"
    )


def rows(found: PipelineReport) -> list[tuple[str, ...]]:
    """Return the stages: number, rank, first module, forward, backward, held, in flight, state, peak."""
    return [
        (
            f"{number}{' (recomputes)' if stage.recompute else ''}",
            str(stage.rank),
            stage.first or "the start",
            format_seconds(stage.forward_seconds),
            format_seconds(stage.backward_seconds),
            format_bytes(stage.held_bytes),
            str(found.in_flight[number]),
            format_bytes(stage.state_bytes),
            format_bytes(found.pipeline.peaks[stage.rank]),
        )
        for number, stage in enumerate(found.pipeline.stages)
    ]


def bars(found: PipelineReport) -> Markup:
    """Draw one step: a line for each rank, with forward and backward of each micro-batch.

    Empty if there are too many to draw.
    """
    if not found.bars:
        return Markup()
    end = max(bar.end for bar in found.bars)
    ranks = found.pipeline.ranks
    height = ranks * (_HEIGHT + _GAP)
    drawn = Markup().join(_bar(bar, end, bar.stage >= ranks) for bar in found.bars)
    label = f"One step of {found.pipeline.schedule} on {ranks} ranks, {format_seconds(end)}"
    return Markup(
        '<svg class="schedule" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{drawn}</svg>'
    ).format(width=int(_WIDTH), height=height, label=label, drawn=drawn)


def _bar(bar: Bar, end: float, later: bool) -> Markup:
    left, wide = _WIDTH * bar.start / end, _WIDTH * (bar.end - bar.start) / end
    top = bar.rank * (_HEIGHT + _GAP)
    text = (
        Markup('<text x="{:.1f}" y="{:.1f}">{}</text>').format(
            left + wide / 2, top + 0.7 * _HEIGHT, bar.batch
        )
        if wide >= _NARROWEST
        else ""
    )
    title = f"{_NAMES[bar.kind]}, stage {bar.stage}, micro-batch {bar.batch}"
    return Markup(
        '<g class="p-{shade}{late}"><title>{title}</title>'
        '<rect x="{left:.2f}" y="{top}" width="{wide:.2f}" height="{high}"/>{text}</g>'
    ).format(
        shade=_SHADES[bar.kind],
        late=" late" if later else "",
        title=title,
        left=left,
        top=top,
        wide=max(wide, 0.3),
        high=_HEIGHT,
        text=text,
    )


def schedules(found: PipelineReport) -> Sequence[tuple[str, ...]]:
    """Return the schedules that fit, fastest first: name, micro-batches, step, bubble, largest peak."""
    return [
        (
            one.schedule,
            str(one.microbatches),
            format_seconds(one.seconds),
            f"{100 * one.bubble:.0f} %",
            format_bytes(one.peak_bytes),
        )
        for one in found.schedules
    ]
