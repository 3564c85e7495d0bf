"""`torchtrim diagnose`: what is wasteful in a script's step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchtrim.cli.limits import checked_price
from torchtrim.cli.options import amount, orders_streams, request_of, runs_script, script_of, writes
from torchtrim.cli.output import command_for, folder_for, progress, show, write_files
from torchtrim.core.isolation import failures

if TYPE_CHECKING:
    from torchtrim.cli.limits import Judged

_CAPTURE = "TT402"


@click.command()
@runs_script
@orders_streams
@writes
@click.option(
    "--fail-on",
    metavar="PRICE",
    callback=checked_price,
    help="Exit 1 if a finding costs 10ms, 50MiB or more.",
)
@click.option("--max-syncs", type=click.IntRange(0), help="Exit 1 over this many waits a step.")
@click.option("--max-peak", metavar="B", callback=amount(), help="Exit 1 if the peak is over this.")
@click.option(
    "--allow",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Findings that count for no limit; the project's torchtrim-allow.toml by default.",
)
@click.option(
    "--capture",
    is_flag=True,
    help="Also what keeps the step from being captured in a CUDA graph; exit 1 if anything does.",
)
@click.option("--update-allow", is_flag=True, help="Write what was found into that file.")
def command(**options: Any) -> None:
    """Find what wastes memory and time in SCRIPT's step."""
    from torchtrim.api import diagnose_report
    from torchtrim.cli.limits import Gate

    script = script_of(options)
    gate = Gate(options, script.project)
    folder = folder_for(options)
    with progress() as tell:
        result = diagnose_report(
            script, request_of(options), capture=options["capture"], progress=tell
        )
    judged = gate.judge(result)
    paths = write_files(judged.result, folder)
    click.echo(judged.said, nl=False, err=options["form"] != "text")
    show(judged.result, form=options["form"], next_command=_next(options, judged), paths=paths)
    blocked = any(one.code == _CAPTURE for one in result.report.findings)
    unknown = options["capture"] and any(one.name == _CAPTURE for one in failures("rule"))
    raise click.exceptions.Exit(0 if judged.passes and not blocked and not unknown else 1)


def _next(options: dict[str, Any], judged: Judged) -> str:
    """How to accept what is over; where there is nothing to accept, how to fit the script."""
    if not judged.acceptable:
        return command_for(options, "optimize", "--memory", "60%")
    words = [
        word
        for name in ("max_syncs", "fail_on", "max_peak", "allow")
        if options[name] is not None
        for word in (f"--{name.replace('_', '-')}", str(options[name]))
    ]
    return command_for(options, "diagnose", *words, "--update-allow")
