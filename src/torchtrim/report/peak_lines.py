"""Tensors live at the peak by line of source: the line once, with its bytes, and whose tensors they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtrim.records import Report
from torchtrim.records.report import Holder
from torchtrim.report import facts
from torchtrim.report.located import excerpt
from torchtrim.report.safe import clean, keep_right

_WIDEST = 80  # Arbitrary; a place that fits one line of the page.


@dataclass(frozen=True, kw_only=True)
class LineHolder:
    """Tensors of one owner: the module with its class, what made it, and why they are live."""

    bytes: int
    kind: str
    owner: str
    type: str
    made: str
    words: str


@dataclass(frozen=True, kw_only=True)
class PeakLine:
    """A source line with the bytes it allocated that are live at the peak, and their share in percent.

    `place` and `code` are empty for tensors of no known line.
    """

    place: str
    code: str
    bytes: int
    share: float
    holders: Sequence[LineHolder]


def peak_lines(report: Report, most: int, folders: Iterable[Path]) -> list[PeakLine]:
    """Return the lines of at most `most` holders, the line with most bytes first."""
    folders = list(folders)
    groups: dict[tuple[str, int], list[Holder]] = defaultdict(list)
    for holder in report.holders[:most]:
        groups[_line_of(holder)].append(holder)
    sizes = {line: sum(one.bytes for one in group) for line, group in groups.items()}
    whole = max(facts.peak_before(report) or 0, sum(sizes.values()), 1)
    return [
        PeakLine(
            place=_place(report, *line),
            code=next(
                (one.text.strip() for one in excerpt(*line, line[1], folders) if one.hot), ""
            ),
            bytes=sizes[line],
            share=100 * sizes[line] / whole,
            holders=[_holder(report, one, line) for one in groups[line]],
        )
        for line in sorted(groups, key=lambda line: (not line[0], -sizes[line]))
    ]


def _line_of(holder: Holder) -> tuple[str, int]:
    if holder.path:
        return holder.path, holder.line
    return holder.made_path, holder.made_line


def _holder(report: Report, holder: Holder, line: tuple[str, int]) -> LineHolder:
    kind = holder.kind.replace("_", " ")
    words = holder.what or kind
    if holder.count > 1:
        words += f", {holder.count} tensors"
    if holder.why and holder.why not in (kind, words):
        words += f": {holder.why}"
    made = (holder.made_path, holder.made_line)
    root = holder.module.partition("#")[0] == holder.type  # Named by its class.
    return LineHolder(
        bytes=holder.bytes,
        kind=holder.kind,
        owner=holder.module,
        type="" if root else holder.type,
        made="" if made == line else _place(report, *made),
        words=words,
    )


def _place(report: Report, path: str, line: int) -> str:
    return keep_right(clean(facts.place(path, line, facts.home(report))), _WIDEST)
