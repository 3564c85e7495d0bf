"""`torchtrim tune-loader`: the best settings of a script's data loader."""

from __future__ import annotations

from typing import Any

import click

from torchtrim.cli.options import Verb, amount, estimates_script, script_of
from torchtrim.cli.output import command_for, show
from torchtrim.cli.progress import progress
from torchtrim.core.units import parse_bytes


@click.command(cls=Verb)
@estimates_script
@click.option(
    "--seconds",
    type=click.FloatRange(0.0, min_open=True),
    default=60.0,
    help="Time to spend on trying settings. Default: 60.",
)
@click.option(
    "--host-memory",
    metavar="B",
    callback=amount(),
    help="Memory that prefetched batches may use, such as 2GiB.",
)
@click.option(
    "--cores",
    type=click.IntRange(1),
    help="Number of cores of the target machine. The result is modelled if this machine has fewer.",
)
def command(**options: Any) -> None:
    """Find the best number of workers and of prefetched batches for SCRIPT's data loader.

    Runs the script's own steps with a few settings of the loader, never with more workers than cores.
    """
    host = options["host_memory"]
    with progress() as tell:
        from torchtrim.api import TuningRequest, tune_loader_report

        request = TuningRequest(
            seconds=options["seconds"],
            memory=None if host is None else parse_bytes(host),
            cores=options["cores"],
        )
        result = tune_loader_report(script_of(options), request, progress=tell)
    following = command_for(options, "diagnose")
    show(result, form=options["form"], next_command=following)
    if options["form"] == "text" and result.report.tuned and result.report.tuned.diff:
        click.echo(result.report.tuned.diff, nl=False)
