"""`torchtrim tune-loader`: the settings of a script's loader."""

from __future__ import annotations

from typing import Any

import click

from torchtrim.cli.options import Verb, amount, estimates_script, script_of
from torchtrim.cli.output import command_for, progress, show
from torchtrim.core.units import parse_bytes


@click.command(cls=Verb)
@estimates_script
@click.option(
    "--seconds",
    type=click.FloatRange(0.0, min_open=True),
    default=60.0,
    help="How long settings may be tried; 60 by default.",
)
@click.option(
    "--host-memory", metavar="B", callback=amount(), help="What batches ahead may take: 2GiB."
)
@click.option(
    "--cores",
    type=click.IntRange(1),
    help="Cores of the machine it is for. For more than are here the result is modelled.",
)
def command(**options: Any) -> None:
    """Find how many workers, and how many batches ahead, suit the loader of SCRIPT's step.

    The script's own steps are run with few settings of its loader, never with more workers than cores.
    """
    from torchtrim.api import TuningRequest, tune_loader_report

    host = options["host_memory"]
    tunes = TuningRequest(
        seconds=options["seconds"],
        memory=None if host is None else parse_bytes(host),
        cores=options["cores"],
    )
    with progress() as tell:
        result = tune_loader_report(script_of(options), tunes, progress=tell)
    following = command_for(options, "diagnose")
    show(result, form=options["form"], next_command=following)
    if options["form"] == "text" and result.report.tuned and result.report.tuned.diff:
        click.echo(result.report.tuned.diff, nl=False)
