"""Saving against the size of the batch: parameters dominate a call of one sample, results one of many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from torchtrim.core.units import format_bytes
from torchtrim.errors import UsageError
from torchtrim.records.files import write_atomically
from torchtrim.records.memory_table import MemoryTable
from torchtrim.report.safe import clean

_WIDTH, _LEFT, _BAR, _PAIR, _TOP = 860, 92, 14, 46, 66
_WIDE = 520
_STYLE = """
.page{fill:#fff}text{fill:#1c1d20}.dim{fill:#5c6066}.results{fill:#4878b0}.kept{fill:#b9bec6}
@media (prefers-color-scheme:dark){
.page{fill:#17181b}text{fill:#e7e8ea}.dim{fill:#a0a5ac}.results{fill:#6d9ed8}.kept{fill:#565b64}}
"""


class Saving(NamedTuple):
    """The bytes of a model and of one call with a batch of that size, as it is and planned.

    Operators' workspace, which is known of planned calls only, is left out of the comparison.
    """

    batch: int
    before: MemoryTable
    after: MemoryTable

    @property
    def share(self) -> float:
        """The share saved, from 0 to 1."""
        return 1 - needed(self.after) / max(needed(self.before), 1)


def needed(table: MemoryTable) -> int:
    """Bytes of results at their highest and of what is there always."""
    return table.total - table.workspace


class SavingPicture:
    """Savings by batch, to be drawn: `svg()`, `save(path)`. `savings` is what is drawn."""

    def __init__(self, model: str, savings: Sequence[Saving]) -> None:
        self.model = model
        self.savings = tuple(savings)

    def svg(self) -> str:
        """As SVG: for each size of the batch a bar of its bytes as it is, and one planned."""
        height = _TOP + _PAIR * len(self.savings) + 8
        return str(
            Markup(
                '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" role="img" '
                'font-size="12" font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif">'
                "<title>{title}</title><style>{style}</style>"
                '<rect class="page" width="{w}" height="{h}"/>{head}{rows}</svg>\n'
            ).format(
                w=_WIDTH,
                h=height,
                title=f"{clean(self.model)}: memory of a call by batch, as it is and planned",
                style=Markup(_STYLE),
                head=Markup("").join(_head(clean(self.model))),
                rows=Markup("").join(_rows(self.savings)),
            )
        )

    def save(self, path: str | Path) -> Path:
        """Write it as SVG."""
        target = Path(path)
        if target.suffix.lower() != ".svg":
            raise UsageError(f"cannot tell how to draw {target.name}: end it in .svg.")
        write_atomically(target, self.svg().encode())
        return target

    def _repr_svg_(self) -> str:
        return self.svg()


def _head(model: str) -> Iterator[Markup]:
    yield _text(16, 24, f"{model}: memory of a call, as it is (above) and planned (below)", "")
    yield _text(16, 44, "each bar against the bytes as it is, without workspace", "dim")
    for x, kind, words in ((440, "results", "results"), (520, "kept", "parameters and buffers")):
        yield _box(x, 35, 10, kind)
        yield _text(x + 16, 44, words, "dim")


def _rows(savings: Sequence[Saving]) -> Iterator[Markup]:
    for number, one in enumerate(savings):
        y = _TOP + _PAIR * number
        yield _text(16, y + _BAR + 6, f"batch {one.batch}", "")
        for table, top in ((one.before, y), (one.after, y + _BAR + 4)):
            yield from _bar(table, needed(one.before), top)
        yield _text(_LEFT + _WIDE + 150, y + _BAR + 6, f"{100 * one.share:.0f} % saved", "")


def _bar(table: MemoryTable, whole: int, y: float) -> Iterator[Markup]:
    results, total = table.outputs, needed(table)
    scale = _WIDE / max(whole, 1)
    yield _box(_LEFT, y, results * scale, "results")
    yield _box(_LEFT + results * scale, y, (total - results) * scale, "kept")
    yield _text(_LEFT + total * scale + 8, y + _BAR - 3, format_bytes(total), "dim")


def _box(x: float, y: float, width: float, kind: str) -> Markup:
    return Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{}"/>').format(
        kind, x, y, width, _BAR if y >= _TOP else 10
    )


def _text(x: float, y: float, words: str, kind: str) -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>').format(kind, x, y, words)
