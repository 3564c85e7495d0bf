"""Charts without a script: areas as SVG that stretches, words as HTML that stays readable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from torchtrim.core.units import format_bytes

_SIZE = 1000
_LABELLED = 0.13
_CROWDED = 0.12
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One kind of memory: its bytes in each column of the picture."""

    kind: str
    values: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Memory over a step: layers from the bottom up, the phase of each column, and the peak."""

    layers: Sequence[Layer]
    phases: Sequence[str]
    peak_column: int
    peak_bytes: int
    peak_name: str
    where: str
    summary: str


def stacked(picture: Picture, top: float, budget: int | None = None) -> Markup:
    """The picture on a scale from 0 to `top` bytes, with its peak and the budget marked."""
    marks = [_grid(tick, top) for tick in ticks(top)]
    if budget is not None:
        marks.append(_budget(budget, top, _across(picture)))
    marks.append(_peak(picture, top, budget))
    return Markup('<div class="chart"><div class="plot">{svg}{marks}</div>{phases}</div>').format(
        svg=_svg(picture, top), marks=Markup().join(marks), phases=_phases(picture.phases)
    )


def ticks(top: float) -> list[int]:
    """Round numbers of bytes from 0 to `top`, five or fewer above zero."""
    unit = next((size for _, size in _UNITS if top >= size), 1)
    step = next((s for s in _STEPS if top <= 5 * s * unit), 1000) * unit
    return list(range(0, int(top) + 1, step))


def _grid(value: int, top: float) -> Markup:
    name, size = next(((n, s) for n, s in _UNITS if value >= s), ("", 1))
    text = f"{value // size} {name}".strip()
    return Markup('<div class="tick" style="bottom:{:.2f}%"><span>{}</span></div>').format(
        100 * value / top, text
    )


def _svg(picture: Picture, top: float) -> Markup:
    areas = []
    heights = [0] * len(picture.phases)
    for layer in picture.layers:
        heights = [a + b for a, b in zip(heights, layer.values, strict=True)]
        if any(layer.values):
            areas.append(
                Markup('<path class="k k-{}" d="{}"/>').format(layer.kind, area(heights, top))
            )
    return Markup(
        '<svg viewBox="0 0 {size} {size}" preserveAspectRatio="none" role="img"'
        ' aria-label="{label}">{areas}</svg>'
    ).format(size=_SIZE, label=picture.summary, areas=Markup().join(reversed(areas)))


def area(heights: Sequence[int], top: float) -> str:
    """A path under these heights, on a square of a thousand with `top` at its upper edge."""
    points, last = [f"M0 {_SIZE}"], None
    for column, height in enumerate(heights):
        y = round(_SIZE * (1 - height / top))
        if y != last:
            points.append(f"H{round(_SIZE * column / len(heights))}V{y}")
            last = y
    return "".join(points) + f"H{_SIZE}V{_SIZE}Z"


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
    strips = Markup().join(
        Markup('<span class="p-{}" style="width:{:.2f}%">{}</span>').format(
            phase, 100 * share, phase if share > _LABELLED else ""
        )
        for phase, share in _runs(phases)
    )
    return Markup('<div class="phases" aria-hidden="true">{}</div>').format(strips)


def _runs(phases: Sequence[str]) -> Iterable[tuple[str, float]]:
    start = 0
    for column in range(1, len(phases) + 1):
        if column == len(phases) or phases[column] != phases[start]:
            yield phases[start], (column - start) / len(phases)
            start = column
