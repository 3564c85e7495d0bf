"""The charts of memory over the step: the original's, and the planned one with the bytes it frees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from torchtrim.core.isolation import isolated
from torchtrim.core.units import format_bytes
from torchtrim.core.words import listed
from torchtrim.planner.freed import freed_bytes
from torchtrim.records import Profile, Report
from torchtrim.report.charts import NOTHING, ORDER, Picture, hidden_bytes, picture, stacked
from torchtrim.report.folds import FoldedLanes, ends_of
from torchtrim.report.freed import Band, Freed, areas, freed, marks, predicted

_HEADROOM = 1.18  # Arbitrary; room for the labels above the peak.
_FAR = 2  # A budget above twice the peak would squeeze the chart into its lower half.


_Step = tuple[str, Profile, FoldedLanes]
_DrawnStep = tuple[str, Profile, Picture, FoldedLanes]


@dataclass(frozen=True, kw_only=True)
class MemoryChart:
    """A chart with its title and caption. `bands`: what each technique of the plan freed in it."""

    title: str
    markup: Markup
    caption: str
    bands: Sequence[Band] = ()


@dataclass(frozen=True, kw_only=True)
class MemoryCharts:
    """The charts, on one scale, and the kinds of memory that they show."""

    charts: Sequence[MemoryChart] = ()
    kinds: Sequence[str] = ()


NO_CHARTS = MemoryCharts()


def memory_charts(report: Report, steps: Sequence[_Step]) -> MemoryCharts:
    """Draw the steps, which have a title each; the first is the original."""
    drawn: list[_DrawnStep] = [
        (title, profile, found, folded)
        for title, profile, folded in steps
        if (found := picture(profile, title, _seconds(profile, folded)))
    ]
    highest = max((found.peak_bytes for _, _, found, _ in drawn), default=0)
    budget = report.budget_bytes
    near = budget if budget is not None and budget <= _FAR * highest else None
    top = _HEADROOM * max(highest, near or 0, 1)
    charts = [
        _chart(report, step, _freed(report, step[2], steps, number), top, near)
        for number, step in enumerate(drawn)
    ]
    layers = [layer for _, _, found, _ in drawn for layer in found.layers if any(layer.values)]
    return MemoryCharts(
        charts=charts, kinds=[kind for kind in ORDER if any(one.kind == kind for one in layers)]
    )


def _chart(
    report: Report, step: _DrawnStep, saved: Freed | None, top: float, near: int | None
) -> MemoryChart:
    title, profile, found, folded = step
    budget = report.budget_bytes if near is None else None
    return MemoryChart(
        title=title + (f", rank {profile.rank}" if report.ranks else ""),
        markup=stacked(
            found,
            top,
            near,
            areas=areas(saved, top) if saved else NOTHING,
            more=marks(saved, top) if saved else NOTHING,
        ),
        caption=_caption(profile, found, folded, budget),
        bands=saved.bands if saved else (),
    )


def _freed(report: Report, drawn: Picture, steps: Sequence[_Step], number: int) -> Freed | None:
    """Return what the plan frees: in the planned chart, or in the original's if it has not run."""
    plan, found = report.plan, None
    if plan is None or not plan.techniques or number + 1 < len(steps):
        return None
    with isolated("renderer", "freed bytes"):
        simulated = freed_bytes(steps[0][1], plan.techniques)
        known = {one.technique for one in simulated}
        others = listed([one.name for one in plan.techniques if one.name not in known])
        if number:
            found = freed(drawn, steps[0][1], steps[number][1], simulated, others)
        elif simulated:
            found = predicted(drawn, steps[0][1], simulated)
    return found


def _seconds(profile: Profile, folded: FoldedLanes) -> list[float]:
    """Return how long each operator takes of the chart's width: until the next starts, the loader's none."""
    seconds = [0.0] * len(profile.operators)
    for span, end in zip(folded.lanes.host, ends_of(folded.lanes), strict=True):
        seconds[span.index] = max(end - span.start, 0.0)
    return seconds


def _caption(profile: Profile, drawn: Picture, folded: FoldedLanes, far_budget: int | None) -> str:
    words = [f"{len(profile.operators)} operators over {drawn.axis}; highest {drawn.where}."]
    words += [folded.caption] if folded.caption else []
    if "recompute" in drawn.phases:
        words.append("Blue below the chart: recomputed forward.")
    if hidden := hidden_bytes(profile, drawn):
        words.append(
            f"The allocator's own peak is {format_bytes(profile.peak_bytes)}: "
            f"{format_bytes(hidden)} more, allocated inside kernels, where the recorder cannot see it."
        )
    if far_budget is not None:
        words.append(f"The budget of {format_bytes(far_budget)} is above the chart.")
    return " ".join(words)
