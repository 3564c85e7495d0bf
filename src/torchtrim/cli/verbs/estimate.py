"""`torchtrim estimate`: what a script would need, without running it."""

from __future__ import annotations

from typing import Any

import click

from torchtrim.cli.options import (
    Verb,
    amount,
    estimates_script,
    script_of,
    sharding_of,
    shards,
    writes,
)
from torchtrim.cli.output import command_for, folder_for, is_over, progress, show, write_files


@click.command(cls=Verb)
@estimates_script
@click.option(
    "--fits",
    metavar="B",
    callback=amount(),
    help="Exit 1 if it does not fit in that memory: 80GiB.",
)
@click.option(
    "--max-batch",
    metavar="B",
    callback=amount(share=True),
    help="Also the largest batch of the script's loaders that fits in that memory: 24GiB.",
)
@shards
@writes
def command(**options: Any) -> None:
    """Estimate the memory that a step of SCRIPT needs, without computing it and without a GPU.

    The script runs, and its operators do not: results have their shapes and no memory. Nothing is saved.
    With --device h100 and the like it is for that GPU, with what the caching allocator reserves. With
    --ranks 8 it is of one process of eight, and with --fsdp its model is sharded over them.
    """
    from torchtrim.api import Request, estimate_report

    folder = folder_for(options)
    with progress() as tell:
        result = estimate_report(
            script_of(options),
            Request(steps=0, dry=True, ranks=options["ranks"] or 0, sharding=sharding_of(options)),
            fits=options["fits"],
            max_batch=options["max_batch"],
            progress=tell,
        )
    paths = write_files(result, folder)
    budget = options["fits"] or "60%"
    alone = not options["ranks"]
    following = command_for(options, "plan", "--memory", budget) if alone else None
    show(result, form=options["form"], next_command=following, paths=paths)
    raise click.exceptions.Exit(1 if is_over(result.report) else 0)
