"""`torchtrim pack`: assign offsets to buffers with lifetimes."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from torchtrim.cli.options import amount
from torchtrim.cli.output import drawn_arena
from torchtrim.cli.progress import progress
from torchtrim.core.units import format_bytes, format_seconds, parse_bytes
from torchtrim.records.commands import path_argument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchtrim.api import Packing
    from torchtrim.memory.packing import Buffer

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it.


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--capacity",
    metavar="N",
    callback=amount(),
    help="Exit 1 if the packing is higher than this: bytes, or 1MiB.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    metavar="F",
    help="Write the table with a column offset; - is stdout.",
)
@click.option(
    "--svg",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="F",
    help="Draw the packing: address against time.",
)
@click.option(
    "--alignment",
    type=click.IntRange(1),
    default=1,
    metavar="N",
    help="Make offsets multiples of N.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0),
    metavar="S",
    help="Time to search; 0 for greedy orders only. Default: a fixed effort.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def command(
    file: Path,
    capacity: str | None,
    out: Path | None,
    svg: Path | None,
    alignment: int,
    seconds: float | None,
    as_json: bool,
) -> None:
    """Give each buffer of FILE an offset so that buffers that are live together do not overlap.

    FILE has comma-separated values with the columns id, lower, upper and size: a buffer of size bytes is
    live from lower until just before upper. An optional column alignment requires multiples as offsets. If
    interrupted, prints and writes the best packing so far; the exit code is then 130.
    """
    from torchtrim.api import read_buffers, why_invalid, write_offsets
    from torchtrim.errors import UsageError
    from torchtrim.records.files import write_atomically

    limit = None if capacity is None else parse_bytes(capacity)
    if as_json and out == Path("-"):
        raise UsageError(
            "--json and --out - would both write to stdout. Give --out a file, or drop one of them."
        )
    read = read_buffers(file)
    begin = time.perf_counter()
    with progress(begins="packing") as tell:
        tell(f"packing: {len(read.buffers)} buffers")
        packing, interrupted = _packed(read.buffers, limit, alignment, seconds)
    took = time.perf_counter() - begin
    reason = why_invalid(read.buffers, packing.offsets, alignment=alignment)
    assert reason is None, reason
    drawn = drawn_arena(read.buffers, packing, file.name, limit) if svg is not None else None
    if svg is not None and drawn is not None:
        write_atomically(svg, drawn)
    if out == Path("-"):
        sys.stdout.buffer.write(write_offsets(read, packing.offsets))
    elif out is not None:
        write_atomically(out, write_offsets(read, packing.offsets))
    if as_json:
        figures = ("height", "lower_bound", "optimal")
        known = {name: getattr(packing, name) for name in figures}
        print(json.dumps({**known, "seconds": round(took, 3)}))
    elif out != Path("-"):
        words = ["torchtrim", "pack", path_argument(str(file)), "--out", f"{file.stem}.packed.csv"]
        following = shlex.join(words) if out is None else None
        _show(packing, len(read.buffers), limit, took, following)
    over = limit is not None and packing.height > limit
    raise click.exceptions.Exit(_INTERRUPTED if interrupted else int(over))


def _packed(
    buffers: Sequence[Buffer], limit: int | None, alignment: int, seconds: float | None
) -> tuple[Packing, bool]:
    from torchtrim.api import pack

    found: list[Packing] = []
    try:
        return pack(
            buffers, limit, alignment=alignment, seconds=seconds, better=found.append
        ), False
    except KeyboardInterrupt:
        if not found:
            raise
        click.echo("interrupted; this is the best packing so far", err=True)
        return found[-1], True


def _show(
    packing: Packing, count: int, limit: int | None, took: float, following: str | None
) -> None:
    above = packing.height - packing.lower_bound
    share = f"{above / packing.lower_bound:.2%} above" if above else "met"
    met = limit is not None and packing.height <= limit
    why = "the search stopped at the capacity" if met else "found no lower packing"
    lines = [
        f"PACKED  {count} buffers in {packing.height} bytes ({format_bytes(packing.height)}), "
        f"{format_seconds(took)}",
        f"  bound    {packing.lower_bound} bytes live at one time: {share}",
        f"  optimal  {'yes' if packing.optimal else f'unknown; {why}'}",
    ]
    if limit is not None:
        over = packing.height - limit
        lines.append(
            f"  capacity {limit} bytes: {f'{over} bytes short' if over > 0 else f'{-over} bytes free'}"
        )
    if following:
        lines.append(f"Offsets: {following}")
    click.echo("\n".join(lines))
