"""`torchtrim export`: a profile in a format of another tool."""

from __future__ import annotations

from pathlib import Path

import click

from torchtrim.cli.output import cleaned


@click.command()
@click.argument("profile", type=click.Path(path_type=Path))
@click.option(
    "--perfetto",
    "perfetto_path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="OUT",
    required=True,
    help="Write a trace for ui.perfetto.dev and chrome://tracing.",
)
@click.option("--no-source", is_flag=True, help="Leave paths and line numbers out of the trace.")
def command(profile: Path, perfetto_path: Path, no_source: bool) -> None:
    """Write PROFILE, a profile.json, as a trace: operators, modules, waits, memory, findings."""
    from torchtrim.api import perfetto_trace
    from torchtrim.records.files import write_atomically

    write_atomically(perfetto_path, perfetto_trace(profile, source=not no_source))
    click.echo(f"wrote {cleaned(str(perfetto_path))}: open it in https://ui.perfetto.dev")
