"""Draws docs/picture.svg from a run of examples/charlm.py: `python docs/picture.py`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from torchtrim import Profile, Script
from torchtrim.api import optimize_report
from torchtrim.core.units import format_bytes
from torchtrim.records.trial import Request
from torchtrim.report.charts import Picture, picture

HERE = Path(__file__).parent
WIDTH, HEIGHT, LEFT, TOP, GAP = 370, 210, 70, 34, 50
COLOURS = {
    "parameter": "#3f66a6",
    "optimizer_state": "#6a9be0",
    "gradient": "#3f9d78",
    "input": "#bfa23a",
    "activation": "#dd7638",
    "temporary": "#bd5a8c",
    "workspace": "#8c7fb5",
}
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 316" role="img"
 font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif" font-size="13">
<title>{title}</title>
<style>
text {{ fill: #1c1d20 }} .dim {{ fill: #5c6066 }} .line {{ stroke: #dcdee1 }}
.budget {{ stroke: #b3302a; stroke-width: 2; stroke-dasharray: 7 5 }} .over {{ fill: #b3302a }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #e7e8ea }} .dim {{ fill: #a0a5ac }} .line {{ stroke: #31343a }}
.budget {{ stroke: #ff8477 }} .over {{ fill: #ff8477 }}
}}
</style>
"""


def areas(drawn: Picture, left: float, top: float) -> Iterator[str]:
    """The kinds of memory, stacked, over the operators of the step; `top` bytes are the full height."""
    count = len(drawn.phases)
    heights = [0] * count
    paths = []
    for layer in drawn.layers:
        heights = [a + b for a, b in zip(heights, layer.values, strict=True)]
        if layer.kind in COLOURS:
            points = "".join(
                f"V{TOP + HEIGHT * (1 - height / top):.1f}H{left + WIDTH * (i + 1) / count:.1f}"
                for i, height in enumerate(heights)
            )
            base = TOP + HEIGHT
            shape = f"M{left} {base}{points}V{base}Z"
            paths.append(f'<path fill="{COLOURS[layer.kind]}" d="{shape}"/>')
    return reversed(paths)


def panel(drawn: Picture, title: str, left: float, top: float, budget: int) -> Iterator[str]:
    """One step: its title and peak, its areas, the budget."""
    yield f'<text x="{left}" y="{TOP - 14}" font-weight="600">{title}: '
    yield f"peak {format_bytes(drawn.peak_bytes)}</text>"
    yield from areas(drawn, left, top)
    base, level = TOP + HEIGHT, TOP + HEIGHT * (1 - budget / top)
    right = left + WIDTH
    yield f'<path class="line" fill="none" d="M{left} {base}H{right}"/>'
    yield f'<path class="budget" fill="none" d="M{left} {level:.1f}H{right}"/>'
    phases = [phase.replace("recompute", "backward") for phase in drawn.phases]
    start = 0
    for phase, run in groupby(phases):
        end = start + len(list(run))
        if end - start > len(phases) / 8:
            x = left + WIDTH * (start + end) / 2 / len(phases)
            yield f'<text class="dim" x="{x:.0f}" y="{base + 18}" text-anchor="middle">'
            yield f"{phase}</text>"
        start = end


def legend(drawn: Picture) -> Iterator[str]:
    """The colours of the kinds that there are."""
    x = LEFT
    for layer in drawn.layers:
        if layer.kind in COLOURS and any(layer.values):
            name = layer.kind.replace("_", " ")
            yield f'<rect x="{x}" y="284" width="12" height="12" fill="{COLOURS[layer.kind]}"/>'
            yield f'<text class="dim" x="{x + 18}" y="295">{name}</text>'
            x += 40 + 7 * len(name)


def draw(before: Profile, after: Profile, budget: int) -> str:
    """The whole picture."""
    one, two = picture(before, "original"), picture(after, "planned")
    assert one is not None
    assert two is not None
    top = 1.05 * one.peak_bytes
    title = (
        f"Memory over one step of examples/charlm.py: {format_bytes(one.peak_bytes)} as it is, "
        f"{format_bytes(two.peak_bytes)} planned for a budget of {format_bytes(budget)}"
    )
    level = TOP + HEIGHT * (1 - budget / top)
    lines = [
        HEAD.format(title=title),
        f'<text class="over" x="{LEFT - 8}" y="{level - 3:.0f}" text-anchor="end">budget</text>',
        f'<text class="over" x="{LEFT - 8}" y="{level + 13:.0f}" text-anchor="end">',
        f"{format_bytes(budget)}</text>",
        *panel(one, "as it is", LEFT, top, budget),
        *panel(two, "planned", LEFT + WIDTH + GAP, top, budget),
        *legend(one),
    ]
    return "".join(lines) + "</svg>\n"


def main() -> None:
    """Run the example, and write the picture."""
    script = Script(str(HERE.parent / "examples/charlm.py"), device="cpu")
    result = optimize_report(script, "60%", Request())
    assert result.before is not None
    assert result.after is not None
    assert result.report.budget_bytes is not None
    svg = draw(result.before, result.after, result.report.budget_bytes)
    (HERE / "picture.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
