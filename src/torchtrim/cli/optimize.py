"""`torchtrim optimize`: the whole loop."""

from __future__ import annotations

from typing import Any

import click

from torchtrim.cli.options import fits, request_of, runs_script, script_of, writes
from torchtrim.cli.output import command_for, folder_for, progress, show, write_files


@click.command()
@runs_script
@fits
@writes
def command(**options: Any) -> None:
    """Fit SCRIPT into a budget: diagnose, plan, run planned, verify, report.

    Exit code 1 if the budget is missed or the planned script is not equal. Arguments of the script
    come after `--`.
    """
    from torchtrim.api import optimize_report

    with progress() as tell:
        result = optimize_report(
            script_of(options),
            options["memory"],
            request_of(options),
            memory_kind=options["memory_kind"],
            progress=tell,
        )
    paths = write_files(result, folder_for(options))
    report = result.report
    if report.smallest_bytes is not None:
        following = command_for(options, "optimize", "--memory", str(report.smallest_bytes))
    else:
        following = command_for(options, "run", "--plan", str(paths["plan"]))
    show(result, form=options["form"], next_command=following, paths=paths)
    unequal = report.certificate is not None and report.certificate.verdict == "NOT EQUAL"
    raise click.exceptions.Exit(1 if report.smallest_bytes is not None or unequal else 0)
