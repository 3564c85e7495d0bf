"""`torchtrim plan`: a plan for a budget, predicted but not run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchtrim.cli.options import Verb, fits, pins, request_of, runs_script, script_of, writes
from torchtrim.cli.output import (
    command_for,
    folder_for,
    followed,
    plan_path,
    show,
    write_files,
)
from torchtrim.cli.plans import pins_in, plan_in
from torchtrim.cli.progress import progress
from torchtrim.errors import UsageError

if TYPE_CHECKING:
    from torchtrim.api import Result


@click.command(cls=Verb)
@runs_script
@fits()
@pins
@writes
@click.option(
    "--export",
    type=click.Choice(["python"]),
    help="Also run and verify the plan as plain PyTorch, and write it: planned.py with apply(model).",
)
@click.option("--frontier", is_flag=True, help="Also show the cost of other budgets.")
@click.option(
    "--stages",
    type=click.IntRange(2, 4096),
    metavar="N",
    help="Plan a pipeline of N processes, each within the budget.",
)
@click.option(
    "--replicas",
    type=click.IntRange(1, 4096),
    default=1,
    metavar="R",
    help="With --stages: run R such pipelines, which share the batch.",
)
@click.option(
    "--find-batch",
    is_flag=True,
    help="Instead of a plan, find the largest batch of the script's loaders that fits: predict, then run.",
)
def command(**options: Any) -> None:
    """Write a plan that is predicted to keep SCRIPT within a budget, without running it as `optimize` does.

    With --export, runs the plan and corrects it by its measured peak. With --stages, cuts the model into
    stages for several processes, by measured time and memory.

    Exit code 1 if no plan fits.
    """
    folder = folder_for(options)
    if options["find_batch"]:
        _find_batch(options, folder)
        return
    plan = plan_in(options, folder)
    phases = ("original", "planning", *(("planned",) if options["export"] else ()))
    with progress(*phases) as tell:
        plans = _pipelined if options["stages"] else _planned
        result = plans(options, plan, tell)
    written = plan_path(result.report, folder, plan)
    following = command_for(options, "verify", "--plan", str(written))
    result = followed(result, following)
    paths = write_files(result, folder, plan)
    show(result, form=options["form"], next_command=following, paths=paths)


def _find_batch(options: dict[str, Any], folder: Path) -> None:
    """Run the script at the batches that are predicted to fit. Exit code 1 if not even one sample fits."""
    if options["frontier"] or options["export"]:
        raise UsageError(
            "--find-batch makes no plan, so it does not combine with --frontier or --export."
        )
    with progress("dry run", further=0) as tell:
        from torchtrim.api import find_batch_report

        result = find_batch_report(
            script_of(options),
            options["memory"],
            memory_kind=options["memory_kind"],
            allow=options["allow"],
            progress=tell,
        )
    assert result.report.estimated is not None
    fits = result.report.estimated.growth[0].largest
    following = (
        command_for(options, "optimize", "--memory", options["memory"])
        if fits
        else command_for(options, "diagnose")
    )
    result = followed(result, following)
    paths = write_files(result, folder)
    show(result, form=options["form"], next_command=following, paths=paths)
    raise click.exceptions.Exit(0 if fits else 1)


def _pipelined(options: dict[str, Any], plan: Path, tell: Callable[[str], None]) -> Result:
    from torchtrim.api import plan_pipeline

    for name in ("export", "frontier", "host_memory"):
        if options[name]:
            raise UsageError(
                f"--{name.replace('_', '-')} is for plans of one process, but --stages plans several."
            )
    if options["memory_kind"] != "allocated" or pins_in(plan):
        raise UsageError(
            "a pipeline is planned by allocated bytes and without pins: remove --memory-kind, and "
            "remove [pins] from the plan or choose another folder with --out."
        )
    return plan_pipeline(
        script_of(options),
        options["memory"],
        request_of(options),
        stages=options["stages"],
        replicas=options["replicas"],
        progress=tell,
    )


def _planned(options: dict[str, Any], plan: Path, tell: Callable[[str], None]) -> Result:
    from torchtrim.api import Terms, export_report, plan_report

    if options["replicas"] > 1:
        raise UsageError("--replicas is for pipelines: add --stages N.")
    if options["export"] and options["frontier"]:
        raise UsageError("--frontier runs no plan, but --export does. Run torchtrim twice.")
    report = functools.partial(plan_report, frontier=options["frontier"])
    return (export_report if options["export"] else report)(
        script_of(options),
        options["memory"],
        request_of(options),
        memory_kind=options["memory_kind"],
        terms=Terms(options["allow"], pins=pins_in(plan)),
        progress=tell,
    )
