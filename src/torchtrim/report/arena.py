"""Draws an arena: address against time, with a box for each buffer and unused space shaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from markupsafe import Markup

from torchtrim.core.units import format_bytes
from torchtrim.memory.packing import Buffer, Packing
from torchtrim.report.charts import ticks
from torchtrim.report.safe import clean, keep_left

MOST_BOXES = 2000  # Arbitrary; with more boxes the picture is slow to open.
_WIDTH, _HEIGHT = 1120, 640  # Arbitrary, as the next line: the picture and its plot fit a screen.
_LEFT, _TOP, _WIDE, _HIGH = 84, 64, 940, 500
_LETTER, _LINE = 6.2, 13.0  # The size of a letter of the boxes' labels, and of a line of text.
_SHADES = 8  # As many colours as the style sheet has (`s0` to `s7`).
_STYLE = """
.page{fill:#fff}.free{fill:#e9ebee}text{fill:#1c1d20}.dim{fill:#5c6066}
.box{stroke:#fff;stroke-width:.7}.name{fill:#14151a}.grid{stroke:#c9cdd2}
.bound{stroke:#b3302a;stroke-dasharray:7 5}.over{fill:#b3302a}.top{stroke:#1c1d20}.cap{stroke:#5c6066}
.s0{fill:#8fb4e3}.s1{fill:#f0b183}.s2{fill:#8fcbb0}.s3{fill:#d9a7cf}
.s4{fill:#e3cf7e}.s5{fill:#a9a5dc}.s6{fill:#a8cf7c}.s7{fill:#e59a97}
@media (prefers-color-scheme:dark){
.page{fill:#17181b}.free{fill:#26282d}text{fill:#e7e8ea}.dim{fill:#a0a5ac}
.box{stroke:#17181b}.name{fill:#f2f3f5}.grid{stroke:#43474e}
.bound{stroke:#ff8477}.over{fill:#ff8477}.top{stroke:#e7e8ea}.cap{stroke:#a0a5ac}
.s0{fill:#34588c}.s1{fill:#8f5227}.s2{fill:#2c6b52}.s3{fill:#7c4a72}
.s4{fill:#73631f}.s5{fill:#55508f}.s6{fill:#4d6d28}.s7{fill:#8a4340}}
"""
_HEAD = Markup(
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" role="img" font-size="12"'
    ' font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif"><title>{title}</title>'
    "<style>{style}</style>"
    '<rect class="page" width="{w}" height="{h}"/>'
)


def render(
    buffers: Sequence[Buffer], packing: Packing, *, title: str, capacity: int | None = None
) -> str:
    """Return the packing as SVG for light and dark themes, with the lower bound and any given capacity.

    Beyond `MOST_BOXES` buffers, only those with the largest boxes are drawn, and the picture says so.
    """
    scale = _ArenaScale(buffers, max(packing.height, capacity or 0, 1))
    shown = _largest([b for b in buffers if b.takes_room])
    head = _HEAD.format(
        w=_WIDTH,
        h=_HEIGHT,
        title=f"{clean(title)}: address against time",
        style=Markup(_STYLE),
    )
    top = scale.y(packing.height)
    free = Markup('<rect class="free" x="{}" y="{:.1f}" width="{}" height="{:.1f}"/>').format(
        _LEFT, top, _WIDE, _TOP + _HIGH - top
    )
    parts = (
        *(head, _words(buffers, packing, title, len(shown)), free),
        *(*_boxes(shown, packing, scale), *_axes(scale), *_lines(packing, capacity, scale)),
    )
    return str(Markup().join(parts) + Markup("</svg>\n"))


class _ArenaScale:
    """Maps times and addresses to coordinates of the picture."""

    def __init__(self, buffers: Sequence[Buffer], top: int) -> None:
        self.begin = min((b.lower for b in buffers), default=0)
        self.end = max((b.upper for b in buffers), default=1)
        self.top = top

    def x(self, moment: int) -> float:
        return _LEFT + _WIDE * (moment - self.begin) / max(self.end - self.begin, 1)

    def y(self, address: int) -> float:
        return _TOP + _HIGH * (1 - address / self.top)


def _largest(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Return the buffers with the largest boxes, in their original order."""
    areas = sorted(((b.upper - b.lower) * b.size for b in buffers), reverse=True)
    least = areas[min(MOST_BOXES, len(areas)) - 1] if areas else 0
    return [b for b in buffers if (b.upper - b.lower) * b.size >= least][:MOST_BOXES]


def _words(buffers: Sequence[Buffer], packing: Packing, title: str, shown: int) -> Markup:
    above = packing.height - packing.lower_bound
    gap = f"{above / packing.lower_bound:.2%} above the bound" if above else "the lower bound"
    real = sum(1 for b in buffers if b.takes_room)
    drawn = f"{real} buffers" if shown >= real else f"the {shown} largest of {real} buffers drawn"
    area = sum((b.upper - b.lower) * b.size for b in buffers)
    begin = min((b.lower for b in buffers), default=0)
    end = max((b.upper for b in buffers), default=0)
    used = area / max((end - begin) * packing.height, 1)
    return Markup(
        '<text x="{x}" y="26" font-size="16" font-weight="600">{}</text>'
        '<text x="{x}" y="46" class="dim">{} in {}, {}; {}</text>'
        '<text x="{x}" y="{y}" class="dim">time; each box is a buffer, space between boxes is unused</text>'
    ).format(
        keep_left(clean(title), 100),
        drawn,
        format_bytes(packing.height),
        gap,
        f"{used:.1%} of the area used",
        x=_LEFT,
        y=_TOP + _HIGH + 40,
    )


def _boxes(buffers: Sequence[Buffer], packing: Packing, scale: _ArenaScale) -> Iterator[Markup]:
    for place, buffer in enumerate(buffers):
        offset = packing.offsets[buffer.id]
        x, wide = scale.x(buffer.lower), scale.x(buffer.upper) - scale.x(buffer.lower)
        y = scale.y(offset + buffer.size)
        high = scale.y(offset) - y
        name = keep_left(clean(str(buffer.id)), 60)
        yield Markup(
            '<rect class="box s{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}">'
            "<title>{}: {} at {}, live from {} to {}</title></rect>"
        ).format(
            place * 5 % _SHADES,
            x,
            y,
            wide,
            high,
            name,
            format_bytes(buffer.size),
            offset,
            buffer.lower,
            buffer.upper,
        )
        label = f"{name}, {format_bytes(buffer.size)}"
        if high >= _LINE and wide >= _LETTER * len(name) + 6:
            yield Markup(
                '<text class="name" font-size="10" x="{:.1f}" y="{:.1f}">{}</text>'
            ).format(
                x + 3,
                y + high / 2 + 3.5,
                label if wide >= _LETTER * len(label) + 6 else name,
            )


def _axes(scale: _ArenaScale) -> Iterator[Markup]:
    base = _TOP + _HIGH
    marks = ticks(scale.top)
    if 1 < len(marks) < 4:
        marks = list(range(0, scale.top + 1, max(marks[1] // 4, 1)))
    for tick in marks:
        yield Markup(
            '<line class="grid" x1="{}" x2="{}" y1="{y:.1f}" y2="{y:.1f}"/>'
            '<text class="dim" text-anchor="end" x="{}" y="{:.1f}">{}</text>'
        ).format(
            _LEFT - 5, _LEFT, _LEFT - 9, scale.y(tick) + 4, format_bytes(tick), y=scale.y(tick)
        )
    for part in range(5):
        moment = scale.begin + (scale.end - scale.begin) * part // 4
        yield Markup(
            '<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{}" y2="{}"/>'
            '<text class="dim" text-anchor="middle" x="{x:.1f}" y="{}">{}</text>'
        ).format(base, base + 5, base + 19, moment, x=scale.x(moment))


def _lines(packing: Packing, capacity: int | None, scale: _ArenaScale) -> Iterator[Markup]:
    """Draw the height, the bound and the capacity as lines with labels at the right."""
    marks = [(packing.lower_bound, "bound", "over", "lower bound")]
    if packing.height != packing.lower_bound:
        marks.append((packing.height, "top", "", "height"))
    if capacity is not None and capacity not in (packing.height, packing.lower_bound):
        marks.append((capacity, "cap", "dim", "capacity"))
    lowest = float("inf")
    for value, line, words, name in sorted(marks):
        y = scale.y(value)
        lowest = min(y + 4, lowest - _LINE)
        yield Markup(
            '<line class="{}" stroke-width="2" x1="{}" x2="{}" y1="{y:.1f}" y2="{y:.1f}"/>'
            '<text class="{}" x="{}" y="{:.1f}">{}</text>'
        ).format(line, _LEFT, _LEFT + _WIDE, words, _LEFT + _WIDE + 6, lowest, name, y=y)
