"""The picture of a planned network: a line for each operator, a lane for each memory.

A lane begins where its memory is first written and ends where it is last read. Lanes of one colour lie at
one place: the memories that share it. Where a network has more lines than fit, the picture says how many
it leaves out.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup, escape

from torchtrim.core.units import format_bytes
from torchtrim.errors import UsageError
from torchtrim.records.files import write_atomically
from torchtrim.records.network_graph import Memory, NetworkGraph, Operator, Section
from torchtrim.report.safe import clean, keep_right

MOST_LINES = 3000
_ROW, _LANE, _TOP, _LEFT = 22, 16, 46, 18
_CHARACTER, _SHADES = 7.3, 137.508
_STYLE = (
    "svg{background:#fff;font:12px ui-monospace,Menlo,Consolas,monospace}"
    "text{fill:#1c1c1c}.d{fill:#666}.t{font-weight:600}.g{stroke:#0001}"
    ".m{stroke-width:9;stroke-linecap:round}.r{fill:#fff;stroke-width:2}.w{stroke:#fff;stroke-width:1}"
    "@media(prefers-color-scheme:dark){svg{background:#16181c}text{fill:#e6e6e6}.d{fill:#9aa0a8}"
    ".g{stroke:#fff1}.r{fill:#16181c}.w{stroke:#16181c}}"
)


class NetworkPicture:
    """A planned network, to be drawn: `svg()`, `dot()`, `save(path)`. `record` is what is drawn."""

    def __init__(self, record: NetworkGraph) -> None:
        self.record = record

    def svg(self) -> str:
        """As SVG: operators from top to bottom in their order, memories as coloured lanes."""
        return _svg(self.record)

    def dot(self) -> str:
        """As a graph for Graphviz: a box for each operator, in the colour of the memory it writes."""
        return _dot(self.record)

    def save(self, path: str | Path) -> Path:
        """Write it as SVG or DOT, by the ending of the path."""
        target = Path(path)
        render = {".svg": self.svg, ".dot": self.dot, ".gv": self.dot}.get(target.suffix.lower())
        if render is None:
            raise UsageError(f"cannot tell how to draw {target.name}: end it in .svg or .dot.")
        write_atomically(target, render().encode())
        return target

    def _repr_svg_(self) -> str:
        return self.svg()


def _svg(record: NetworkGraph) -> str:
    parts, y, width = [], 0.0, 400.0
    for section in record.sections:
        drawn, height, wide = _drawn(section, y)
        parts.append(drawn)
        y, width = y + height, max(width, wide)
    title = f"{clean(record.model)}: operators in their order, and the memory they share"
    return str(
        Markup(
            '<svg xmlns="http://www.w3.org/2000/svg" width="{w:.0f}" height="{h:.0f}" '
            'viewBox="0 0 {w:.0f} {h:.0f}" role="img"><title>{title}</title><style>{style}</style>'
            "{parts}</svg>\n"
        ).format(w=width, h=y + 12, title=title, style=Markup(_STYLE), parts=Markup().join(parts))
    )


def _drawn(section: Section, top: float) -> tuple[Markup, float, float]:
    """The section, its height and its width."""
    shown = section.operators[:MOST_LINES]
    lanes, shades = lanes_of(section.memories), colours_of(section)
    begin = _LEFT + _LANE * (max(lanes, default=-1) + 1) + 10
    y0 = top + _TOP
    pieces = [_heading(section, top, len(section.operators) - len(shown))]
    across = [_LEFT + lane * _LANE for lane in lanes]
    for memory, x, shade in zip(section.memories, across, shades, strict=True):
        pieces.append(_lane(memory, x, shade, y0, len(shown)))
    for line, operator in enumerate(shown):
        y = y0 + line * _ROW
        pieces += [_dots(operator, across, shades, y), _words(section, operator, begin, y)]
    longest = max((len(_text(section, operator)) for operator in shown), default=0)
    return Markup().join(pieces), _TOP + _ROW * len(shown), begin + longest * _CHARACTER + 20


def lanes_of(memories: Sequence[Memory]) -> list[int]:
    """A lane for each memory, so that no two that live at once have the same; as few as there can be."""
    lanes = [0] * len(memories)
    free: list[int] = []
    used, ending = 0, list[tuple[int, int]]()
    for number in sorted(range(len(memories)), key=lambda n: (memories[n].first, n)):
        while ending and ending[0][0] <= memories[number].first:
            heapq.heappush(free, heapq.heappop(ending)[1])
        if not free:
            heapq.heappush(free, used)
            used += 1
        lanes[number] = heapq.heappop(free)
        heapq.heappush(ending, (memories[number].last, lanes[number]))
    return lanes


def colours_of(section: Section) -> list[str]:
    """A colour for each memory: one for each place in the arena, a paler one for each of its own."""
    places = sorted({m.offset for m in section.memories if m.offset >= 0})
    hues = {offset: number for number, offset in enumerate(places)}
    return [
        _shade(hues[m.offset], 68) if m.offset >= 0 else _shade(number, 34)
        for number, m in enumerate(section.memories)
    ]


def _shade(number: int, saturation: int) -> str:
    return f"hsl({number * _SHADES % 360:.0f} {saturation}% {44 + 9 * (number % 3)}%)"


def _heading(section: Section, top: float, left_out: int) -> Markup:
    arena = f"an arena of {format_bytes(section.height)}, " if section.height else "no arena, "
    own = sum(m.offset < 0 for m in section.memories)
    words = (
        f"{len(section.operators)} operators on {clean(section.title)}; {arena}{own} memories apart"
    )
    if left_out:
        words += f"; the last {left_out} operators are left out"
    return Markup('<text class="t" x="{}" y="{:.0f}">{}</text>').format(_LEFT, top + 22, words)


def _lane(memory: Memory, x: int, shade: str, y0: float, shown: int) -> Markup:
    if memory.first >= shown:
        return Markup()
    return Markup(
        '<line class="m" x1="{x}" x2="{x}" y1="{a:.0f}" y2="{b:.1f}" stroke="{c}">'
        "<title>{t}</title></line>"
    ).format(
        x=x,
        a=y0 + memory.first * _ROW,
        b=y0 + (min(memory.last, shown) - 1) * _ROW + 0.1,
        c=shade,
        t=f"{format_bytes(memory.bytes)}, {_place(memory)}",
    )


def _place(memory: Memory) -> str:
    if memory.offset < 0:
        return "memory of its own"
    return f"at {format_bytes(memory.offset)} of the arena"


def _dots(operator: Operator, across: Sequence[int], shades: Sequence[str], y: float) -> Markup:
    """A ring where a memory is read, a disc where it is written."""
    ring = Markup('<circle class="r" cx="{}" cy="{:.0f}" r="3" stroke="{}"/>')
    disc = Markup('<circle class="w" cx="{}" cy="{:.0f}" r="6" fill="{}"/>')
    read = [number for number in operator.reads if number not in operator.writes]
    dots = [ring.format(across[number], y, shades[number]) for number in read]
    dots += [disc.format(across[number], y, shades[number]) for number in operator.writes]
    return Markup().join(dots)


def _words(section: Section, operator: Operator, x: float, y: float) -> Markup:
    name, rest = _name(operator), _rest(section, operator)
    return Markup('<text x="{:.0f}" y="{:.0f}">{} <tspan class="d">{}</tspan></text>').format(
        x, y + 4, name, rest
    )


def _text(section: Section, operator: Operator) -> str:
    return f"{_name(operator)} {_rest(section, operator)}"


def _name(operator: Operator) -> str:
    return clean(operator.name)


def _rest(section: Section, operator: Operator) -> str:
    """Shape, bytes and place of what it writes, and the module."""
    shape = "x".join(map(str, operator.shape))
    words = [shape]
    if operator.writes:
        memory = section.memories[operator.writes[0]]
        words.append(format_bytes(memory.bytes))
        words.append("in place" if operator.takes_over else _place(memory))
    else:
        words.append("a view")
    words.append(keep_right(clean(operator.module), 48))
    return " · ".join(word for word in words if word)


def _dot(record: NetworkGraph) -> str:
    lines = [
        f'digraph "{_quoted(record.model)}" {{',
        "node [shape=box style=filled fontname=monospace]",
    ]
    for place, section in enumerate(record.sections):
        shades = colours_of(section)
        lines.append(f'subgraph cluster_{place} {{ label="{_quoted(section.title)}"')
        for number, operator in enumerate(section.operators):
            shade = shades[operator.writes[0]] if operator.writes else "hsl(0 0% 96%)"
            label = f"{_quoted(_name(operator))}\\n{_quoted(_rest(section, operator))}"
            lines.append(f'n{place}_{number} [label="{label}" fillcolor="{_hsv(shade)}"]')
        for number, operator in enumerate(section.operators):
            lines += [f"n{place}_{need} -> n{place}_{number}" for need in operator.needs]
        lines.append("}")
    return "\n".join([*lines, "}"]) + "\n"


def _hsv(shade: str) -> str:
    """Graphviz takes hue, saturation and value between 0 and 1."""
    hue, saturation, light = (float(part.rstrip("%")) for part in shade[4:-1].split())
    pale = 0.62 if saturation else 0.0
    return f"{hue / 360:.3f} {pale:.2f} {0.95 if saturation else light / 100:.2f}"


def _quoted(text: str) -> str:
    return str(escape(clean(text))).replace("\\", "\\\\")
