"""Memory against time: a point for each plan, and what checkpointing by hand would need, as a chart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from markupsafe import Markup

from torchtrim.core.units import format_bytes, format_seconds
from torchtrim.records.report import FrontierPoint
from torchtrim.report.svg import ticks

_SIZE = 1000
_MARGIN = 1.06
_SHARES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_LINES = 5
_MIDDLE = 0.5


class _Scale(NamedTuple):
    """What the edges of the chart are: bytes on the right, and seconds below and above."""

    bytes: float
    least: float
    most: float

    def across(self, point: FrontierPoint) -> float:
        """From 0 to 1, from the left."""
        return point.peak_bytes / self.bytes

    def up(self, seconds: float) -> float:
        """From 0 to 1, from below."""
        return (seconds - self.least) / (self.most - self.least)


def chart(points: Sequence[FrontierPoint]) -> Markup:
    """The chart; empty where there is nothing to compare."""
    if len(points) < 2:
        return Markup()
    scale = _scale(points)
    plans = sorted((p for p in points if not p.by_hand), key=lambda p: p.peak_bytes)
    marks = [*_grid(scale), *(_dot(scale, p) for p in plans)]
    marks += [_dot(scale, p) for p in points if p.by_hand]
    return Markup(
        '<div class="chart trade"><div class="plot">{line}{marks}</div>'
        '<div class="bytes">{bytes}</div></div>'
    ).format(line=_line(scale, plans), marks=Markup().join(marks), bytes=_bytes(scale))


def _scale(points: Sequence[FrontierPoint]) -> _Scale:
    quickest = min(one.step_seconds for one in points)
    slowest = max(one.step_seconds for one in points)
    widest = max(one.peak_bytes for one in points)
    most = quickest + max(slowest - quickest, quickest * _SHARES[0]) * _MARGIN
    return _Scale(widest * _MARGIN, quickest, most)


def _line(scale: _Scale, plans: Sequence[FrontierPoint]) -> Markup:
    """Stairs, since between two plans the tighter one is taken."""
    corners = [(scale.across(p), scale.up(p.step_seconds)) for p in plans]
    path = "".join(
        f"{'H' if n else 'M'}{_x(x)}{'V' if n else ' '}{_y(y)}" for n, (x, y) in enumerate(corners)
    )
    return Markup(
        '<svg viewBox="0 0 {size} {size}" preserveAspectRatio="none" role="img" aria-label="{label}">'
        '<path class="stairs" d="{path}H{size}"/></svg>'
    ).format(size=_SIZE, path=path, label="the step's time for each peak that plans reach")


def _x(across: float) -> int:
    return round(_SIZE * across)


def _y(up: float) -> int:
    return round(_SIZE * (1 - up))


def _grid(scale: _Scale) -> Iterator[Markup]:
    """Lines at round shares over the quickest step."""
    whole = scale.most / scale.least - 1
    share = next((s for s in _SHARES if whole <= _LINES * s), _SHARES[-1])
    for number in range(int(whole / share) + 1):
        up = scale.up(scale.least * (1 + number * share))
        text = f"+{100 * number * share:.0f} %" if number else format_seconds(scale.least)
        yield Markup('<div class="tick" style="bottom:{:.2f}%"><span>{}</span></div>').format(
            100 * up, text
        )


def _bytes(scale: _Scale) -> Markup:
    return Markup().join(
        Markup('<span style="left:{:.2f}%">{}</span>').format(
            100 * value / scale.bytes, format_bytes(value)
        )
        for value in ticks(scale.bytes)[1:]
    )


def _dot(scale: _Scale, point: FrontierPoint) -> Markup:
    across, up = scale.across(point), scale.up(point.step_seconds)
    figures = f"{format_bytes(point.peak_bytes)}, {format_seconds(point.step_seconds)}"
    words = f"{point.by_hand or 'plan'}: {figures}"
    label = Markup('<b class="{}">{}</b>').format(_side(across), point.by_hand)
    return Markup('<i class="{}" style="left:{:.2f}%;bottom:{:.2f}%" title="{}">{}</i>').format(
        "hand" if point.by_hand else "dot",
        100 * across,
        100 * up,
        words,
        label if point.by_hand else "",
    )


def _side(across: float) -> str:
    return "after" if across < _MIDDLE else "ahead"
