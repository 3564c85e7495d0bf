"""Charts without scripts: areas as SVG that stretches, labels as HTML that stays readable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeVar

from markupsafe import Markup

from torchtrim.analysis.timeline import kinds_over_time
from torchtrim.core.units import format_bytes, format_seconds
from torchtrim.records import Profile
from torchtrim.records.report import FrontierPoint
from torchtrim.report.safe import clean, keep_right

T = TypeVar("T")

NOTHING = Markup()
_SIZE = 1000  # Arbitrary; whole numbers on this square are as fine as pixels.
_CROWDED = 0.12  # Share of the height at which the labels of peak and budget would overlap.
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
ORDER = (
    "parameter",
    "buffer",
    "optimizer_state",
    "gradient",
    "gathered",
    "input",
    "activation",
    "temporary",
    "workspace",
)
_OUTSIDE = {
    "optimizer": "in the optimizer",
    "other": "outside modules",
    "loader": "in the loader",
    "recompute": "in the recomputed forward",
}
_COLUMNS = 400  # Arbitrary; about one column for every two pixels of the page.
_NOTICEABLE = 200  # A difference of one 200th, half a percent, is too small to see.
_MARGIN = 1.06  # Arbitrary; keeps the outermost points off the edge.
_SHARES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_MOST_TIMES = 5  # Arbitrary; more grid lines would crowd the chart.


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One kind of memory: its bytes in each column of the chart."""

    kind: str
    values: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Memory over a step: layers from the bottom up, each column's phase and operator, and the peak."""

    layers: Sequence[Layer]
    phases: Sequence[str]
    peak_column: int
    peak_bytes: int
    peak_name: str
    where: str
    summary: str
    axis: str
    operators: Sequence[int] = ()

    @property
    def totals(self) -> list[int]:
        """The bytes of all layers in each column."""
        return [sum(values) for values in zip(*(one.values for one in self.layers), strict=True)]


def stacked(
    picture: Picture,
    top: float,
    budget: int | None = None,
    *,
    areas: Markup = NOTHING,
    more: Markup = NOTHING,
) -> Markup:
    """Draw the picture on a scale from 0 to `top` bytes, with its peak and the budget marked.

    `areas` and `more` are drawn over its areas and over its marks.
    """
    marks = [grid_line(tick, top) for tick in ticks(top)]
    if budget is not None:
        marks.append(_budget(budget, top, _across(picture)))
    marks += [_peak(picture, top, budget), more]
    return Markup('<div class="chart"><div class="plot">{svg}{marks}</div>{phases}</div>').format(
        svg=_svg(picture, top, areas), marks=Markup().join(marks), phases=_phases(picture.phases)
    )


def ticks(top: float) -> list[int]:
    """Return round numbers of bytes from 0 to `top`, at most five above zero."""
    unit = next((size for _, size in _UNITS if top >= size), 1)
    step = next((s for s in _STEPS if top <= 5 * s * unit), 1000) * unit
    return list(range(0, int(top) + 1, step))


def grid_line(value: int, top: float) -> Markup:
    """Draw a line across the plot at `value`, with its size."""
    name, size = next(((n, s) for n, s in _UNITS if value >= s), ("", 1))
    text = f"{value // size} {name}".strip()
    return Markup('<div class="tick" style="bottom:{:.2f}%"><span>{}</span></div>').format(
        100 * value / top, text
    )


def _svg(picture: Picture, top: float, more: Markup) -> Markup:
    areas = [
        Markup('<path class="k k-{}" d="{}"/>').format(layer.kind, path)
        for layer, path in layer_paths(picture, top)
        if any(layer.values)
    ]
    return Markup(
        '<svg viewBox="0 0 {size} {size}" preserveAspectRatio="none" role="img"'
        ' aria-label="{label}">{areas}</svg>'
    ).format(size=_SIZE, label=picture.summary, areas=Markup().join([*reversed(areas), more]))


def layer_paths(picture: Picture, top: float) -> Iterator[tuple[Layer, str]]:
    """Yield each layer with the SVG path of its area and those below it, from the bottom up.

    The paths lie on a square of 1000 with `top` at its upper edge.
    """
    heights = [0] * len(picture.phases)
    for layer in picture.layers:
        heights = [a + b for a, b in zip(heights, layer.values, strict=True)]
        yield layer, f"M0 {_SIZE}V{stairs(heights, top)}V{_SIZE}Z"


def stairs(heights: Sequence[int], top: float, *, back: bool = False) -> str:
    """Return the path along the tops of columns, from the left end's height or `back` from the right end."""
    levels = [round(_SIZE * (1 - height / top)) for height in heights]
    edges = [
        (y, round(_SIZE * start / len(heights)), round(_SIZE * end / len(heights)))
        for y, start, end in column_runs(levels)
    ]
    if back:
        return "".join(f"V{y}H{start}" for y, start, _ in reversed(edges))
    return "V".join(f"{y}H{end}" for y, _, end in edges)


def _peak(picture: Picture, top: float, budget: int | None) -> Markup:
    across = _across(picture)
    side = "left" if across < 0.5 else "right"
    inset = across if side == "left" else 1 - across
    height = picture.peak_bytes / top
    line = 0 if budget is None else budget / top
    above = line if 0 <= line - height < _CROWDED else height
    return Markup(
        '<div class="peak" style="left:{:.2f}%;height:{:.2f}%"></div>'
        '<div class="tag" style="{}:{:.2f}%;bottom:{:.2f}%">{} {}</div>'
    ).format(
        100 * across,
        100 * height,
        side,
        100 * inset,
        100 * above,
        picture.peak_name,
        format_bytes(picture.peak_bytes),
    )


def _across(picture: Picture) -> float:
    return (picture.peak_column + 0.5) / max(len(picture.phases), 1)


def _budget(budget: int, top: float, peak: float) -> Markup:
    side = "right" if peak < 0.25 or 0.5 <= peak < 0.75 else "left"
    return Markup(
        '<div class="budget {}" style="bottom:{:.2f}%"><span>budget {}</span></div>'
    ).format(side, 100 * budget / top, format_bytes(budget))


def _phases(phases: Sequence[str]) -> Markup:
    """Draw the strip of phases. A name that does not fit wraps onto a second line, which is hidden."""
    shares = ((phase, (end - start) / len(phases)) for phase, start, end in column_runs(phases))
    strips = Markup().join(
        Markup('<span class="p-{}" style="width:{:.2f}%"><i></i><b>{}</b></span>').format(
            phase, 100 * share, phase
        )
        for phase, share in shares
    )
    return Markup('<div class="phases" aria-hidden="true">{}</div>').format(strips)


def column_runs(columns: Sequence[T]) -> Iterator[tuple[T, int, int]]:
    """Yield each run of equal columns: its value, its first column and the column after its last."""
    end = 0
    for value, run in groupby(columns):
        start, end = end, end + len(list(run))
        yield value, start, end


def picture(profile: Profile, title: str, seconds: Sequence[float] = ()) -> Picture | None:
    """Return memory by kind over the step, or None for a profile without operators.

    Operators are as wide as their `seconds`; without any, they are equally wide.
    """
    timed = sum(seconds) > 0
    samples = kinds_over_time(profile, _COLUMNS, seconds if timed else ())
    if not samples:
        return None
    totals = [sum(sample.by_kind.values()) for sample in samples]
    column = totals.index(max(totals))
    kinds = [kind for kind in ORDER if kind in samples[0].by_kind]
    layers = [Layer(kind=kind, values=[s.by_kind[kind] for s in samples]) for kind in kinds]
    operator = samples[column].operator
    module, phase = profile.module_of(operator), profile.operators[operator].phase
    where = during(phase, module)
    return Picture(
        layers=layers,
        operators=[sample.operator for sample in samples],
        phases=[profile.operators[sample.operator].phase for sample in samples],
        peak_column=column,
        peak_bytes=totals[column],
        peak_name="peak" if _peak_is_drawn(profile, totals[column]) else "tracked peak",
        where=where,
        summary=f"{title}: memory by kind over the step, {format_bytes(totals[column])} {where}",
        axis=format_seconds(sum(seconds)) if timed else "the step in order",
    )


def during(phase: str, module: str) -> str:
    """Return `"in backward of Net.head"`, or `"in the optimizer"` outside modules."""
    if module:
        return f"in {phase} of {keep_right(clean(module), 60)}"
    return _OUTSIDE.get(phase, f"in {phase}")


def _peak_is_drawn(profile: Profile, drawn: int) -> bool:
    return abs(profile.peak_bytes - drawn) <= profile.peak_bytes / _NOTICEABLE


def hidden_bytes(profile: Profile, drawn: Picture) -> int:
    """Return the bytes of the measured peak that no operator accounts for, 0 if too few to see."""
    if _peak_is_drawn(profile, drawn.peak_bytes):
        return 0
    return max(profile.peak_bytes - drawn.peak_bytes, 0)


class _TradeScale(NamedTuple):
    """The edges of the chart: bytes on the right, and seconds at the bottom and the top."""

    bytes: float
    least: float
    most: float

    def across(self, point: FrontierPoint) -> float:
        return point.peak_bytes / self.bytes

    def up(self, seconds: float) -> float:
        return (seconds - self.least) / (self.most - self.least)


def trade_off(points: Sequence[FrontierPoint]) -> Markup:
    """Draw the step time over the peak of each plan; empty with fewer than two points."""
    if len(points) < 2:
        return Markup()
    quickest = min(one.step_seconds for one in points)
    slowest = max(one.step_seconds for one in points)
    widest = max(one.peak_bytes for one in points)
    most = quickest + max(slowest - quickest, quickest * _SHARES[0]) * _MARGIN
    scale = _TradeScale(widest * _MARGIN, quickest, most)
    plans = sorted((p for p in points if not p.by_hand), key=lambda p: p.peak_bytes)
    marks = [*_time_grid(scale), *(_dot(scale, p) for p in plans)]
    marks += [_dot(scale, p) for p in points if p.by_hand]
    sizes = Markup().join(
        Markup('<span style="left:{:.2f}%">{}</span>').format(
            100 * value / scale.bytes, format_bytes(value)
        )
        for value in ticks(scale.bytes)[1:]
    )
    return Markup(
        '<div class="chart trade"><div class="plot">{line}{marks}</div>'
        '<div class="bytes">{bytes}</div></div>'
    ).format(line=_line(scale, plans), marks=Markup().join(marks), bytes=sizes)


def _line(scale: _TradeScale, plans: Sequence[FrontierPoint]) -> Markup:
    """Draw stairs: a budget between two plans takes the plan with the smaller peak."""
    corners = [
        (round(_SIZE * scale.across(p)), round(_SIZE * (1 - scale.up(p.step_seconds))))
        for p in plans
    ]
    path = "".join(
        f"{'H' if n else 'M'}{x}{'V' if n else ' '}{y}" for n, (x, y) in enumerate(corners)
    )
    return Markup(
        '<svg viewBox="0 0 {size} {size}" preserveAspectRatio="none" role="img" aria-label="{label}">'
        '<path class="stairs" d="{path}H{size}"/></svg>'
    ).format(size=_SIZE, path=path, label="step time for each peak that a plan reaches")


def _time_grid(scale: _TradeScale) -> Iterator[Markup]:
    whole = scale.most / scale.least - 1
    share = next((s for s in _SHARES if whole <= _MOST_TIMES * s), _SHARES[-1])
    for number in range(int(whole / share) + 1):
        up = scale.up(scale.least * (1 + number * share))
        text = f"+{100 * number * share:.0f} %" if number else format_seconds(scale.least)
        yield Markup('<div class="tick" style="bottom:{:.2f}%"><span>{}</span></div>').format(
            100 * up, text
        )


def _dot(scale: _TradeScale, point: FrontierPoint) -> Markup:
    across, up = scale.across(point), scale.up(point.step_seconds)
    figures = f"{format_bytes(point.peak_bytes)}, {format_seconds(point.step_seconds)}"
    words = f"{point.by_hand or 'plan'}: {figures}"
    side = "after" if across < 0.5 else "ahead"
    label = Markup('<b class="{}">{}</b>').format(side, point.by_hand)
    return Markup('<i class="{}" style="left:{:.2f}%;bottom:{:.2f}%" title="{}">{}</i>').format(
        "hand" if point.by_hand else "dot",
        100 * across,
        100 * up,
        words,
        label if point.by_hand else "",
    )
