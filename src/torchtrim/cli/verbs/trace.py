"""`torchtrim trace`: the host-device syncs in a profiler trace, and their cost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from torchtrim.cli.output import show_trace
from torchtrim.cli.progress import progress
from torchtrim.records.commands import path_argument, plain_command

if TYPE_CHECKING:
    from torchtrim.records.trace import TraceReport


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--max-syncs", type=click.IntRange(0), help="Exit 1 if a rank waits more often than this."
)
@click.option(
    "--source",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Folder of the source, to find the lines of calls.",
)
@click.option(
    "--top", type=click.IntRange(1), default=8, help="Number of sites to show. Default: 8."
)
def command(
    paths: tuple[Path, ...], as_json: bool, max_syncs: int | None, source: Path | None, top: int
) -> None:
    """Find every wait in a trace of torch.profiler: a file, a log folder, or one file per rank."""
    with progress(begins="reading") as tell:
        from torchtrim.api import diagnose_traces

        report = diagnose_traces(paths, source=source, progress=tell)
    if as_json:
        import msgspec

        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        show_trace(report, top, _next(report, paths, source))
    most = max(rank.waits for rank in (report, *report.ranks))
    raise click.exceptions.Exit(1 if max_syncs is not None and most > max_syncs else 0)


def _next(report: TraceReport, paths: tuple[Path, ...], source: Path | None) -> str | None:
    """Suggest `--source` if lines are uncertain, else the page on the rule."""
    unsure = any(site.path and not site.exact for site in report.sites)
    if unsure and source is None:
        return plain_command(
            "trace", *(path_argument(str(path)) for path in paths), "--source", "."
        )
    return plain_command("explain", "TT101") if report.waits else None
