"""`torchtrim plan`: a plan for a budget, not yet tried."""

from __future__ import annotations

from typing import Any

import click

from torchtrim.cli.options import fits, request_of, runs_script, script_of, writes
from torchtrim.cli.output import command_for, folder_for, progress, show, write_files


@click.command()
@runs_script
@fits()
@writes
@click.option("--frontier", is_flag=True, help="Also what other budgets would cost.")
def command(**options: Any) -> None:
    """Write a plan with which SCRIPT is predicted to stay within a budget.

    Exit code 1 if there is none.
    """
    from torchtrim.api import plan_report

    with progress() as tell:
        result = plan_report(
            script_of(options),
            options["memory"],
            request_of(options),
            memory_kind=options["memory_kind"],
            frontier=options["frontier"],
            progress=tell,
        )
    paths = write_files(result, folder_for(options))
    following = command_for(options, "verify", "--plan", str(paths["plan"]))
    show(result, form=options["form"], next_command=following, paths=paths)
