"""`torchtrim compare`: what changed between two reports or profiles."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from torchtrim.cli.options import chosen_form
from torchtrim.cli.output import said_of, show_comparison
from torchtrim.core.isolation import failures
from torchtrim.core.units import parse_bytes

if TYPE_CHECKING:
    from torchtrim.records.comparison import Change, Comparison

_MILLISECONDS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*ms\s*")
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True, kw_only=True)
class Limit:
    """How much worse a figure or a new finding may be: in ms, in bytes, or in percent."""

    text: str
    ms: float | None = None
    bytes: int | None = None
    percent: float | None = None

    @classmethod
    def of(cls, text: str) -> Limit:
        """The limit that `10ms`, `50MiB` or `5%` names. Raises `UsageError` for anything else."""
        if match := _MILLISECONDS.fullmatch(text):
            return cls(text=text, ms=float(match[1]))
        if match := _PERCENT.fullmatch(text):
            return cls(text=text, percent=float(match[1]))
        return cls(text=text, bytes=parse_bytes(text))

    def passed(self, comparison: Comparison) -> Iterator[str]:
        """What is worse by more than the limit, or as much. A change within its spread is not."""
        for change in comparison.changes:
            if change.judged == "more" and self._is_dear(change):
                yield f"{change.name} {said_of(change)}, --fail-on {self.text}"
        for found in comparison.findings:
            by_time = self.ms is not None and (found.finding.price_ms or 0) >= self.ms
            by_size = self.bytes is not None and (found.finding.price_bytes or 0) >= self.bytes
            if found.change == "new" and (by_time or by_size):
                yield f"new finding {found.finding.code}, --fail-on {self.text}"

    def _is_dear(self, change: Change) -> bool:
        assert change.before is not None
        assert change.after is not None
        by = change.after - change.before
        if self.percent is not None:
            return change.unit != "count" and 100 * by >= self.percent * change.before
        if self.ms is not None:
            return change.unit == "seconds" and by * 1e3 >= self.ms
        return change.unit == "bytes" and self.bytes is not None and by >= self.bytes


@click.command()
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option("--fail-on", metavar="PRICE", help="Exit 1 if it got worse by 10ms, 50MiB, 5%.")
@click.option(
    "--json", "as_json", is_flag=True, is_eager=True, help="The comparison as JSON, on stdout."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "markdown"]),
    callback=chosen_form,
    help="Format of stdout; text by default.",
)
def command(before: Path, after: Path, fail_on: str | None, as_json: bool, form: str) -> None:
    """Tell what changed from BEFORE to AFTER: report.json or profile.json files.

    A change within the spread of the timed steps is no significant change, and fails nothing.
    """
    import msgspec

    from torchtrim.api import compare
    from torchtrim.records.comparison import load_report_or_profile

    limit = Limit.of(fail_on) if fail_on is not None else None
    one, other = load_report_or_profile(before), load_report_or_profile(after)
    found = compare(one, other, str(before), str(after))
    over = tuple(limit.passed(found)) if limit is not None else ()
    failed = tuple(f"{one}; --fail-on was not checked for it" for one in failures("rule"))
    notes = (*failed, *found.notes) if limit is not None else found.notes
    show_comparison(msgspec.structs.replace(found, over=over, notes=notes), form)
    raise click.exceptions.Exit(1 if over or (limit is not None and failed) else 0)
