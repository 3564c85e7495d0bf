"""`torchtrim snapshot`: who holds a GPU's memory, and which allocator settings would help."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from torchtrim.cli.output import show_snapshot, write_snapshot_page
from torchtrim.cli.progress import progress


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--setting",
    "settings",
    multiple=True,
    metavar="CONF",
    help="Also replay under this value of PYTORCH_CUDA_ALLOC_CONF. Can be repeated.",
)
@click.option("--top", type=click.IntRange(1), default=8, help="Holders to show. Default: 8.")
@click.option(
    "--page",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="F",
    help="Draw memory over time into an HTML file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--fail-on-oom", is_flag=True, help="Exit 1 if a request failed for want of memory.")
def command(
    file: Path,
    settings: tuple[str, ...],
    top: int,
    page: Path | None,
    as_json: bool,
    fail_on_oom: bool,
) -> None:
    """Explain a memory snapshot written by torch.cuda.memory._dump_snapshot.

    Says who holds the peak, what is reserved without being used, why a request failed, and what other
    allocator settings would reserve, by replaying every request. Nothing in the file is executed.
    """
    with progress(begins="reading") as tell:
        from torchtrim.api import snapshot_report

        report = snapshot_report(file, settings=settings, progress=tell)
    if as_json:
        import msgspec

        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        show_snapshot(report, top)
    if page is not None and write_snapshot_page(report, page) and not as_json:
        click.echo(f"wrote     {page}")
    failed = fail_on_oom and any(device.ooms for device in report.devices)
    raise click.exceptions.Exit(1 if failed else 0)
