"""`torchtrim compare`: the changes between two reports or profiles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from torchtrim.cli.options import PriceLimit, chosen_form
from torchtrim.cli.output import change_words, show_comparison
from torchtrim.core.isolation import failures

if TYPE_CHECKING:
    from torchtrim.records.comparison import Change, Comparison


def _exceeded(limit: PriceLimit, comparison: Comparison) -> Iterator[str]:
    """Describe the figures that rose beyond their spread and the limit, and new findings at that price."""
    for change in comparison.changes:
        if change.judged == "more" and _is_large(limit, change):
            yield f"{change.name} {change_words(change)}, --fail-on {limit.text}"
    for found in comparison.findings:
        if found.change == "new" and limit.reached_by(found.finding):
            yield f"new finding {found.finding.code}, --fail-on {limit.text}"


def _is_large(limit: PriceLimit, change: Change) -> bool:
    assert change.before is not None
    assert change.after is not None
    by = change.after - change.before
    if limit.percent is not None:
        return change.unit != "count" and 100 * by >= limit.percent * change.before
    if limit.ms is not None:
        return change.unit == "seconds" and by * 1e3 >= limit.ms
    return change.unit == "bytes" and limit.bytes is not None and by >= limit.bytes


@click.command()
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option(
    "--fail-on", metavar="PRICE", help="Exit 1 if a figure rises by this much: 10ms, 50MiB or 5%."
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    is_eager=True,
    help="Print JSON; short for --format json.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "markdown"]),
    callback=chosen_form,
    help="Format of the output on stdout. Default: text.",
)
def command(before: Path, after: Path, fail_on: str | None, as_json: bool, form: str) -> None:
    """Show the changes from BEFORE to AFTER: report.json or profile.json files.

    A change within the spread of the timed steps is not significant and never fails --fail-on.
    """
    import msgspec

    from torchtrim.api import compare
    from torchtrim.records.comparison import load_report_or_profile

    limit = PriceLimit.of(fail_on, share=True) if fail_on is not None else None
    one, other = load_report_or_profile(before), load_report_or_profile(after)
    found = compare(one, other, str(before), str(after))
    over = tuple(_exceeded(limit, found)) if limit is not None else ()
    failed = tuple(f"{one}; --fail-on was not checked for it" for one in failures("rule"))
    notes = (*failed, *found.notes) if limit is not None else found.notes
    show_comparison(msgspec.structs.replace(found, over=over, notes=notes), form)
    raise click.exceptions.Exit(1 if over or (limit is not None and failed) else 0)
