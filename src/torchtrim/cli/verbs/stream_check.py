"""`torchtrim stream-check`: state that grows from frame to frame in a streaming script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from torchtrim.cli.options import Verb, amount, counts_frames, runs_stream, script_of, writes
from torchtrim.cli.output import (
    command_for,
    folder_for,
    followed,
    show,
    write_files,
)
from torchtrim.cli.progress import progress
from torchtrim.core.units import parse_bytes
from torchtrim.records.commands import plain_command

if TYPE_CHECKING:
    from torchtrim.api import Result


@click.command(cls=Verb)
@runs_stream
@counts_frames
@writes
@click.option(
    "--max-growth",
    metavar="B",
    default="0B",
    callback=amount(zero=True),
    help="Exit 1 if a frame adds more than this, such as 1KiB. Default: 0B.",
)
def command(**options: Any) -> None:
    """Measure the memory that each frame of SCRIPT adds; name the containers that grow.

    Runs on the CPU for --frames frames or until the script ends. The verdict is FLAT if frames add no memory,
    GROWS (exit code 1) if they add more than --max-growth, else IN BOUNDS.
    """
    most = parse_bytes(options["max_growth"], zero=True)
    folder = folder_for(options)
    with progress() as tell:
        from torchtrim.api import StreamRequest, check_report

        request = StreamRequest(options["frames"], options["frames_of"])
        result = check_report(script_of(options), request, most, tell)
    stream = result.report.stream
    assert stream is not None
    grows = stream.growth_bytes > most
    following = _next(options, result, grows)
    result = followed(result, following)
    paths = write_files(result, folder)
    show(result, form=options["form"], next_command=following, paths=paths)
    raise click.exceptions.Exit(1 if grows else 0)


def _next(options: dict[str, Any], result: Result, grows: bool) -> str | None:
    """Suggest verifying the fix if an adapter has one, else the page on fixes."""
    if not grows or result.before is None:
        return None
    fixed = {"bound_session", "bound_state"}.intersection(g.adapter for g in result.before.growths)
    return (
        command_for(options, "verify", "--stream") if fixed else plain_command("explain", "TT501")
    )
