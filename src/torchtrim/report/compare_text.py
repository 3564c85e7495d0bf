"""Renders a comparison on a terminal and as Markdown: figures before and after, new and gone findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from torchtrim.core.units import counted, format_bytes, format_seconds
from torchtrim.records.comparison import Change, Comparison, FindingChange
from torchtrim.report import facts
from torchtrim.report.blocks import WIDEST, Column, TextTable, escape, labelled, show
from torchtrim.report.safe import clean, keep_left, keep_right, noting_cuts

_FIGURES = (
    Column(width=21, gap=0),
    Column(width=10, gap=1, right=True),
    Column(width=10, gap=0, right=True),
    Column(),
)
_FIGURE_HEADS = (
    Column(),
    Column(head="before", right=True),
    Column(head="after", right=True),
    Column(head="change"),
)
_FINDING_HEADS = (
    Column(),
    *(Column(head=head, right=head == "price") for head in ("code", "place", "price", "what")),
)
_FIGURES_WIDTH = 44  # The widths and gaps of `_FIGURES` before its last column.
_MOST_KINDS = 5  # Arbitrary, as the next number: a comparison fits a screen.
_MOST_FINDINGS = 8
_MOST_ROWS = 50  # Arbitrary; a comment stays readable.
_STYLES = {"less": "green", "more": "red"}
_MARKS = {"new": "+", "gone": "-", "kept": "="}


def headline(comparison: Comparison) -> str:
    """Return `"2 figures changed, 1 new finding, 3 gone"`, or `"no significant change"`."""
    moved = sum(change.judged in ("less", "more") for change in comparison.changes)
    counts = Counter(found.change for found in comparison.findings)
    parts = (
        f"{counted(moved, 'figure')} changed" if moved else "",
        counted(counts["new"], "new finding") if counts["new"] else "",
        f"{counts['gone']} gone" if counts["gone"] else "",
    )
    return ", ".join(part for part in parts if part) or "no significant change"


def amount(change: Change, value: float | None) -> str:
    """Format a figure for people; empty if unknown."""
    if value is None:
        return ""
    if change.unit == "bytes":
        return format_bytes(value)
    return format_seconds(value) if change.unit == "seconds" else f"{value:.0f}"


def difference(change: Change) -> str:
    """Return the change, such as `"-4.70 MiB (-7 %)"` or `"no significant change, -1 % +- 4 %"`."""
    if change.before is None or change.after is None:
        return "only after" if change.before is None else "only before"
    by = change.after - change.before
    share = facts.percent(change.before, change.after)
    if change.judged == "unknown":
        return f"{share}, spread unknown" if share else "spread unknown"
    around = ""
    if change.spread and change.before:
        around = f" +- {100 * change.spread / change.before:.0f} %"
    if change.judged == "no significant change":
        return f"{change.judged}, {share}{around}" if by else "the same"
    sign = "+" if by > 0 else "-"
    return f"{sign}{amount(change, abs(by))}" + (f" ({share}{around})" if share else "")


def price_change(found: FindingChange) -> str:
    """Return a finding's price, or both prices if it stayed and its price changed."""
    now = facts.price(found.finding)
    was = facts.price(found.before) if found.before is not None else now
    if was == now:
        return now
    return f"{was.removesuffix(' modelled') or 'no price'} -> {now or 'no price'}"


def render(comparison: Comparison, console: Console) -> None:
    """Print the comparison."""
    with noting_cuts() as cuts:
        lines = [*_lines(comparison, max(60, min(console.width, WIDEST)))]
    show([*lines, *([Text("cut texts are whole in --json", "dim")] if cuts else [])], console)


def _lines(comparison: Comparison, width: int) -> Iterator[Text]:
    style = "bold red" if comparison.over else "bold"
    yield Text(headline(comparison), style)
    for name, side in (("before", comparison.before), ("after", comparison.after)):
        yield Text(f"{name:<8}").append(keep_right(clean(side.path), width - 8), "cyan")
    kinds = [one for one in comparison.by_kind if one.judged != "no significant change"]
    figures = [_figure(change, width) for change in (*comparison.changes, *kinds[:_MOST_KINDS])]
    yield from TextTable(_FIGURES, figures).lines(width)
    changed = [found for found in comparison.findings if _is_listed(found)]
    for found in changed[:_MOST_FINDINGS]:
        yield _finding(comparison, found, width)
    if len(changed) > _MOST_FINDINGS:
        yield Text(f"+{len(changed) - _MOST_FINDINGS} more, see --json", "dim")
    for label, texts in (("over", comparison.over), ("note", comparison.notes)):
        for text in texts:
            yield from labelled(label, [clean(text)], width, indent=8, lines=3)


def _is_listed(found: FindingChange) -> bool:
    return found.change != "kept" or "->" in price_change(found)


def _figure(change: Change, width: int) -> tuple[str | Text, ...]:
    words = keep_left(difference(change), width - _FIGURES_WIDTH)
    amounts = amount(change, change.before), amount(change, change.after)
    return clean(change.name), *amounts, Text(words, _STYLES.get(change.judged, "dim"))


def _finding(comparison: Comparison, found: FindingChange, width: int) -> Text:
    finding = found.finding
    side = comparison.before if found.change == "gone" else comparison.after
    where = facts.place(finding.path, finding.line, facts.home(side))
    line = Text(f"{_MARKS[found.change]} {clean(finding.code):<6} ")
    line.append(keep_right(clean(where), width // 3) + "  ", "cyan")
    cost = price_change(found)
    room = width - line.cell_len - len(cost) - 2
    return line.append((keep_left(clean(finding.message), room) if room > 3 else "") + "  " + cost)


def markdown(comparison: Comparison) -> str:
    """Return the comparison as Markdown for a pull request."""
    rows = [
        (one.name, amount(one, one.before), amount(one, one.after), difference(one))
        for one in (*comparison.changes, *comparison.by_kind)
    ]
    blocks = [
        f"## torchtrim: {escape(headline(comparison))}",
        TextTable(_FIGURE_HEADS, rows).markdown(),
        _finding_rows([found for found in comparison.findings if _is_listed(found)]),
        "\n".join(f"* over the limit: {escape(text)}" for text in comparison.over),
        "\n".join(f"* {escape(text)}" for text in comparison.notes),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _finding_rows(changed: Sequence[FindingChange]) -> str:
    if not changed:
        return ""
    rows = [
        (
            found.change,
            found.finding.code,
            facts.place(found.finding.path, found.finding.line),
            price_change(found),
            found.finding.message,
        )
        for found in changed[:_MOST_ROWS]
    ]
    more = len(changed) - len(rows)
    return TextTable(_FINDING_HEADS, rows).markdown(f"and {more} more, see `--json`." * (more > 0))
