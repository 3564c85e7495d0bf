"""Draws a planned network: a line for each operator, a lane for each memory.

A lane begins where its memory is first written and ends where it is last read. Lanes of the same colour share
an address of the arena. If a network has more lines than fit, the picture says how many it omits.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup, escape

from torchtrim.core.units import format_bytes
from torchtrim.errors import UsageError
from torchtrim.records.files import write_atomically
from torchtrim.records.network_graph import GraphMemory, GraphOperator, NetworkGraph, Section
from torchtrim.report.safe import clean, keep_right

MOST_LINES = 3000  # Arbitrary; viewers of SVG slow down on taller pictures.
_ROW, _LANE, _TOP, _LEFT = 22, 16, 46, 18  # Arbitrary; a line is readable, a lane narrow.
_CHARACTER = 7.3  # The width of a character of the font.
_SHADES = 137.508  # Degrees of the golden angle: consecutive hues are far apart.
_STYLE = (
    "svg{background:#fff;font:12px ui-monospace,Menlo,Consolas,monospace}"
    "text{fill:#1c1c1c}.d{fill:#666}.t{font-weight:600}.g{stroke:#0001}"
    ".m{stroke-width:9;stroke-linecap:round}.r{fill:#fff;stroke-width:2}.w{stroke:#fff;stroke-width:1}"
    "@media(prefers-color-scheme:dark){svg{background:#16181c}text{fill:#e6e6e6}.d{fill:#9aa0a8}"
    ".g{stroke:#fff1}.r{fill:#16181c}.w{stroke:#16181c}}"
)


class NetworkPicture:
    """A picture of a planned network, `record`: `svg()`, `dot()`, `save(path)`."""

    def __init__(self, record: NetworkGraph) -> None:
        self.record = record

    def svg(self) -> str:
        """Return SVG: operators from top to bottom in execution order, memories as coloured lanes."""
        return _svg(self.record)

    def dot(self) -> str:
        """Return a Graphviz graph: a box for each operator, in the colour of the memory it writes."""
        return _dot(self.record)

    def save(self, path: str | Path) -> Path:
        """Write the picture as SVG or DOT, by the suffix of the path."""
        target = Path(path)
        render = {".svg": self.svg, ".dot": self.dot, ".gv": self.dot}.get(target.suffix.lower())
        if render is None:
            raise UsageError(f"cannot draw {target.name}: the name must end in .svg, .dot or .gv.")
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
    shown = section.operators[:MOST_LINES]
    lanes, shades = lanes_of(section.memories), colours_of(section)
    begin = _LEFT + _LANE * (max(lanes, default=-1) + 1) + 10
    y0 = top + _TOP
    pieces = [_heading(section, top, len(section.operators) - len(shown))]
    across = [_LEFT + lane * _LANE for lane in lanes]
    for memory, x, shade in zip(section.memories, across, shades, strict=True):
        pieces.append(_lane(memory, x, shade, y0, len(shown)))
    words = Markup('<text x="{:.0f}" y="{:.0f}">{} <tspan class="d">{}</tspan></text>')
    longest = 0
    for line, operator in enumerate(shown):
        y = y0 + line * _ROW
        name, rest = clean(operator.name), _rest(section, operator)
        longest = max(longest, len(name) + 1 + len(rest))
        pieces += [_dots(operator, across, shades, y), words.format(begin, y + 4, name, rest)]
    return Markup().join(pieces), _TOP + _ROW * len(shown), begin + longest * _CHARACTER + 20


def lanes_of(memories: Sequence[GraphMemory]) -> list[int]:
    """Assign a lane to each memory, with as few lanes as possible and no two live memories in the same."""
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
    """Return a colour for each memory: one per address of the arena, paler ones for separate memories."""
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
        f"{len(section.operators)} operators on {clean(section.title)}; {arena}"
        f"{own} separate memories"
    )
    if left_out:
        words += f"; the last {left_out} operators are omitted"
    return Markup('<text class="t" x="{}" y="{:.0f}">{}</text>').format(_LEFT, top + 22, words)


def _lane(memory: GraphMemory, x: int, shade: str, y0: float, shown: int) -> Markup:
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


def _place(memory: GraphMemory) -> str:
    if memory.offset < 0:
        return "separate memory"
    return f"at {format_bytes(memory.offset)} of the arena"


def _dots(
    operator: GraphOperator, across: Sequence[int], shades: Sequence[str], y: float
) -> Markup:
    ring = Markup('<circle class="r" cx="{}" cy="{:.0f}" r="3" stroke="{}"/>')
    disc = Markup('<circle class="w" cx="{}" cy="{:.0f}" r="6" fill="{}"/>')
    read = [number for number in operator.reads if number not in operator.writes]
    dots = [ring.format(across[number], y, shades[number]) for number in read]
    dots += [disc.format(across[number], y, shades[number]) for number in operator.writes]
    return Markup().join(dots)


def _rest(section: Section, operator: GraphOperator) -> str:
    """Return the shape, bytes and place of the operator's output, and its module."""
    words = ["x".join(map(str, operator.shape))]
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
            label = f"{_quoted(operator.name)}\\n{_quoted(_rest(section, operator))}"
            lines.append(f'n{place}_{number} [label="{label}" fillcolor="{_hsv(shade)}"]')
        for number, operator in enumerate(section.operators):
            lines += [f"n{place}_{need} -> n{place}_{number}" for need in operator.needs]
        lines.append("}")
    return "\n".join([*lines, "}"]) + "\n"


def _hsv(shade: str) -> str:
    """Convert a colour to Graphviz's hue, saturation and value between 0 and 1."""
    hue, saturation, light = (float(part.rstrip("%")) for part in shade[4:-1].split())
    pale = 0.62 if saturation else 0.0
    return f"{hue / 360:.3f} {pale:.2f} {0.95 if saturation else light / 100:.2f}"


def _quoted(text: str) -> str:
    return str(escape(clean(text))).replace("\\", "\\\\")
