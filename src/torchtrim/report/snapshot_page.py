"""Draws a memory snapshot as one HTML file: memory over the events, by what allocated it."""

from __future__ import annotations

from markupsafe import Markup

from torchtrim.core.units import format_bytes
from torchtrim.records.snapshot_report import Curve, DeviceSnapshot, SnapshotReport
from torchtrim.report.charts import Layer, Picture, grid_line, layer_paths, ticks
from torchtrim.report.html import environment
from torchtrim.report.safe import clean
from torchtrim.report.snapshot_text import headline, next_command, place, sentences

KINDS = {
    "held before": "parameter",
    "optimizer": "optimizer_state",
    "backward": "gradient",
    "forward": "activation",
    "other": "temporary",
}
"""The colour of each kind, from the bottom of the chart up."""
_MOST_HOLDERS = 40
_HEADROOM = 1.1  # Room above the highest line.
_SIZE = 1000  # As in `charts`: the side of the square on which paths lie.


def render(report: SnapshotReport) -> str:
    """Return the page. A device that ran out of memory comes first."""
    devices = sorted(report.devices, key=lambda device: not device.ooms)
    several = len(devices) > 1
    template = environment().get_template("snapshot.html.jinja")
    return template.render(
        report=report,
        devices=[_view(device, several) for device in devices],
        next=next_command(report),
        kinds=KINDS,
    )


def _view(device: DeviceSnapshot, several: bool) -> dict[str, object]:
    holders = device.holders[:_MOST_HOLDERS]
    return {
        "name": f", device {device.device}" if several else "",
        "headline": clean(headline(device)),
        "tone": "bad" if device.ooms else "good",
        "chart": chart(device.curve),
        "sentences": [(label, clean(text)) for label, text in sentences(device)],
        "holders": [(each, place(each), " > ".join(map(clean, each.within))) for each in holders],
        "more": len(device.holders) - len(holders),
        "tried": device.tried,
        "base": max(device.base.peak_reserved, 1),
    }


def chart(curve: Curve) -> Markup:
    """Draw the kinds as areas, and the reserved bytes as a line."""
    top = max([*curve.reserved, *curve.allocated, 1]) * _HEADROOM
    count = len(curve.allocated)
    picture = Picture(
        layers=[
            Layer(kind=colour, values=curve.kinds.get(kind, (0,) * count))
            for kind, colour in KINDS.items()
        ],
        operators=(),
        phases=[""] * count,
        peak_column=0,
        peak_bytes=0,
        peak_name="",
        where="",
        axis="",
        summary=f"Memory over the events, at most {format_bytes(max(curve.reserved, default=0))} reserved",
    )
    areas = [
        Markup('<path class="k k-{}" d="{}"/>').format(layer.kind, path)
        for layer, path in layer_paths(picture, top)
        if any(layer.values)
    ]
    line = Markup('<path class="reserved" d="{}"/>').format(_line(curve.reserved, top))
    return Markup(
        '<div class="chart"><div class="plot"><svg viewBox="0 0 {size} {size}" '
        'preserveAspectRatio="none" role="img" aria-label="{label}">{areas}{line}</svg>{grid}</div></div>'
    ).format(
        size=_SIZE,
        label=picture.summary,
        areas=Markup().join(reversed(areas)),
        line=line,
        grid=Markup().join(grid_line(tick, top) for tick in ticks(top)),
    )


def _line(values: tuple[int, ...], top: float) -> str:
    points: list[str] = []
    for column, value in enumerate(values):
        x, y = round(_SIZE * column / len(values)), round(_SIZE * (1 - value / top))
        points.append(f"H{x}V{y}" if points else f"M{x} {y}")
    return "".join(points) + f"H{_SIZE}"
