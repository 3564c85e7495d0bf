"""`torchtrim diagnose`: what is wasteful in a script's step."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from torchtrim.cli.options import request_of, runs_script, script_of, writes
from torchtrim.cli.output import command_for, folder_for, progress, show, write_files
from torchtrim.errors import UsageError
from torchtrim.units import parse_bytes

if TYPE_CHECKING:
    from torchtrim.records.report import Report

_MILLISECONDS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*ms\s*")


@click.command()
@runs_script
@writes
@click.option("--fail-on", metavar="PRICE", help="Exit 1 if a finding costs 10ms, 50MiB or more.")
@click.option("--max-syncs", type=click.IntRange(0), help="Exit 1 over this many waits a step.")
@click.option("--max-peak", metavar="B", help="Exit 1 if the peak is over this.")
def command(**options: Any) -> None:
    """Find what wastes memory and time in SCRIPT's step."""
    from torchtrim.api import diagnose_report

    limits = _Limits(options["fail_on"], options["max_syncs"], options["max_peak"])
    with progress() as tell:
        result = diagnose_report(script_of(options), request_of(options), progress=tell)
    paths = write_files(result, folder_for(options))
    following = command_for(options, "optimize", "--memory", "60%")
    show(result, as_json=options["as_json"], next_command=following, paths=paths)
    raise click.exceptions.Exit(1 if limits.passed(result.report) else 0)


class _Limits:
    """What a report must not pass."""

    def __init__(self, fail_on: str | None, max_syncs: int | None, max_peak: str | None) -> None:
        self._ms: float | None = None
        self._bytes: int | None = None
        if fail_on is not None:
            match = _MILLISECONDS.fullmatch(fail_on)
            if match:
                self._ms = float(match[1])
            else:
                self._bytes = parse_bytes(fail_on)
        self._syncs = max_syncs
        self._peak = parse_bytes(max_peak) if max_peak is not None else None

    def passed(self, report: Report) -> bool:
        """Whether the report passes one of the limits."""
        if report.original is None:
            raise UsageError("the step was not measured, so there is nothing to hold to a limit.")
        waits = sum(f.count_per_step for f in report.findings if f.code.startswith("TT1"))
        dear = any(
            (self._ms is not None and (f.price_ms or 0) >= self._ms)
            or (self._bytes is not None and (f.price_bytes or 0) >= self._bytes)
            for f in report.findings
        )
        too_many = self._syncs is not None and waits > self._syncs
        too_high = self._peak is not None and report.original.peak_bytes > self._peak
        return dear or too_many or too_high
