"""`torchtrim estimate`: the memory that a script needs, without computing its step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from torchtrim.cli.options import (
    Verb,
    amount,
    estimates_script,
    memory_kind,
    script_of,
    sharding_of,
    shards,
    writes,
)
from torchtrim.cli.output import command_for, folder_for, followed, is_over, show, write_files
from torchtrim.cli.progress import progress

if TYPE_CHECKING:
    from torchtrim.records.profile import Profile


@click.command(cls=Verb)
@estimates_script
@click.option(
    "--fits",
    metavar="B",
    callback=amount(),
    help="Exit 1 if the step does not fit into this memory, such as 80GiB.",
)
@click.option(
    "--max-batch",
    metavar="B",
    callback=amount(share=True),
    help="Also find the largest batch of the script's loaders that fits into this memory, such as 24GiB.",
)
@memory_kind("allocated", "reserved")
@shards
@writes
def command(**options: Any) -> None:
    """Estimate the memory that a step of SCRIPT needs, without computing it and without a GPU.

    Runs the script without computing its operators: their results have shapes but no memory. Of a script that
    only runs a model, a step is the call with the highest peak, of all that it makes. With --device
    h100, estimates for that GPU, and what its caching allocator reserves. With --ranks 8, estimates one
    process of eight; with --fsdp, shards the model over them.
    """
    folder = folder_for(options)
    with progress("dry run", further=0) as tell:
        from torchtrim.api import Request, estimate_report

        result = estimate_report(
            script_of(options),
            Request(steps=0, dry=True, ranks=options["ranks"] or 0, sharding=sharding_of(options)),
            fits=options["fits"],
            max_batch=options["max_batch"],
            memory_kind=options["memory_kind"],
            progress=tell,
        )
    following = _following(result.before, options)
    result = followed(result, following)
    paths = write_files(result, folder)
    show(result, form=options["form"], next_command=following, paths=paths)
    raise click.exceptions.Exit(1 if is_over(result.report) else 0)


def _following(profile: Profile | None, options: dict[str, Any]) -> str | None:
    """Return the next command: it fits the step, or the calls of a script that only runs its models."""
    memory = ("--memory", options["fits"] or "60%")
    if options["ranks"]:
        return None
    if profile is None or any(op.phase == "backward" for op in profile.operators):
        return command_for(options, "optimize", *memory)
    if options["device"] in (None, "cpu"):
        return command_for(options, "optimize", "--mode", "inference", *memory)
    return None
