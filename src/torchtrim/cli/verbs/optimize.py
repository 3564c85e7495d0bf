"""`torchtrim optimize`: diagnose, fix, plan, run and verify."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from torchtrim.cli.options import (
    Verb,
    fits,
    pins,
    request_of,
    runs_script,
    script_of,
    watch,
    writes,
)
from torchtrim.cli.output import (
    command_for,
    folder_for,
    plan_path,
    show,
    write_diff,
    write_files,
)
from torchtrim.cli.plans import pins_in, plan_in
from torchtrim.cli.progress import progress
from torchtrim.errors import NothingTrains, UsageError
from torchtrim.records.profile import is_emulated

if TYPE_CHECKING:
    from torchtrim.api import Result
    from torchtrim.records.report import Report

_NO_FIXES = (
    "--fix and --unsafe-fixes fix the syncs of a training loop, but --mode inference plans the calls of a "
    "model. Run torchtrim twice."
)

_NO_FIXES_OF_RANKS = (
    "--processes fits ranks into a budget: add --memory and drop --fix. Fix host-device syncs in one "
    "process: torchtrim optimize SCRIPT --fix, without --processes."
)

_NO_PINS = (
    "{} has [pins], which apply to training, and --mode inference would overwrite it. Choose another "
    "folder with --out."
)


@click.command(cls=Verb)
@runs_script
@fits(required=False)
@pins
@writes
@click.option(
    "--mode",
    type=click.Choice(["training", "inference"]),
    help="inference: plan the calls of a model that SCRIPT only runs. Default: what SCRIPT does.",
)
@click.option(
    "--candidates",
    type=click.IntRange(1, 6),
    default=1,
    show_default=True,
    help="Number of plans to run for the budget; the fastest is kept.",
)
@click.option("--fix", is_flag=True, help="Write the fixes of host-device syncs into the source.")
@click.option(
    "--unsafe-fixes",
    is_flag=True,
    help="Also apply fixes that no run confirmed, or that may change results in other ways.",
)
def command(**options: Any) -> None:
    """Fit SCRIPT into a memory budget: watch some steps, plan, run the plan, and compare every result.

    With --memory, writes a plan that `torchtrim run` applies; the source stays as it is. Without --memory,
    finds the lines that make the CPU wait for the GPU, and proves rewrites of them; --fix writes those.
    A script that only runs a model is planned for its calls; without --memory, for the smallest peak.

    Exit code 1 if the budget is missed or the planned script differs from the original. Put the script's
    arguments after `--`.
    """
    folder = folder_for(options)
    plan = plan_in(options, folder)
    fits = options["memory"] is not None
    phases = ("original", "planning", "planned", "report") if fits else ("original",)
    with progress(*phases, further=2 if fits else 0) as tell:
        result = _optimized(options, folder, plan, tell)
    path = plan_path(result.report, folder, plan)
    following = _next(options, result, path)
    fixes = result.report.fixes
    if fixes is not None and fixes.diff and not fixes.written:
        fixes = replace(fixes, command=_fixing(options))
    notes = (*_hints(options, result, path, following), *result.report.notes)
    report = replace(result.report, next=following, fixes=fixes, notes=notes)
    result = result._replace(report=report)
    paths = write_files(result, folder, plan)
    show(result, form=options["form"], next_command=following, paths=paths)
    raise click.exceptions.Exit(1 if report.floor_bytes is not None or _unequal(report) else 0)


def _optimized(
    options: dict[str, Any], folder: Path, plan: Path, tell: Callable[[str], None]
) -> Result:
    from torchtrim.api import optimize_calls_instead, optimize_calls_report

    script, request = script_of(options), request_of(options)
    write, unsafe = options["fix"], options["unsafe_fixes"]
    kind = options["memory_kind"]
    if script.processes > 1 and (write or unsafe or options["memory"] is None):
        raise UsageError(_NO_FIXES_OF_RANKS)
    if options["mode"] == "inference":
        if write or unsafe:
            raise UsageError(_NO_FIXES)
        if script.processes > 1:
            raise UsageError("--mode inference does not support --processes.")
        if pins_in(plan):
            raise UsageError(_NO_PINS.format(plan))
        return optimize_calls_report(
            script, options["memory"], request, memory_kind=kind, progress=tell
        )
    try:
        return _trained(options, folder, plan, tell)
    except NothingTrains:
        alone = script.processes == 1
        if options["mode"] == "training" or write or unsafe or pins_in(plan) or not alone:
            raise
        return optimize_calls_instead(
            script, options["memory"], request, memory_kind=kind, progress=tell
        )


def _trained(
    options: dict[str, Any], folder: Path, plan: Path, tell: Callable[[str], None]
) -> Result:
    from torchtrim.api import Terms, fix_report, optimize_report, with_fixes

    script, request = script_of(options), request_of(options)
    write, unsafe = options["fix"], options["unsafe_fixes"]
    fixed = None
    if options["memory"] is None or write or unsafe:
        watch(script.path or Path.cwd())
        fixed = fix_report(
            script,
            request,
            unsafe=unsafe,
            write=write,
            ready=partial(write_diff, folder),
            progress=tell,
        )
    if options["memory"] is None:
        assert fixed is not None
        return fixed
    fitted = optimize_report(
        script,
        options["memory"],
        request,
        memory_kind=options["memory_kind"],
        terms=Terms(options["allow"], pins=pins_in(plan), candidates=options["candidates"]),
        fixes=fixed is None and script.processes == 1,
        progress=tell,
    )
    if fixed is None or fixed.report.fixes is None:
        return fitted
    return fitted._replace(report=with_fixes(fitted.report, fixed.report.fixes))


def _unequal(report: Report) -> bool:
    return report.certificate is not None and report.certificate.verdict == "NOT EQUAL"


def _next_of_missed(options: dict[str, Any], result: Result, plan: Path) -> str:
    """Suggest the option or the search for a batch that meets the budget, else the nearest plan."""
    report, profile = result.report, result.before
    assert report.budget_bytes is not None
    if _unequal(report):
        return command_for(options, "diagnose")
    budget = ("--memory", options["memory"])
    for lever in report.levers:
        if lever.needs.startswith("--allow ") and lever.peak_bytes <= report.budget_bytes:
            return command_for(options, "optimize", *budget, *lever.needs.split())
    kinds = report.original.by_kind if report.original is not None else {}
    held = sum(kinds.get(kind, 0) for kind in ("parameter", "buffer", "optimizer_state"))
    has_loader = profile is not None and bool(profile.waits) and not result.ranks
    if has_loader and held < report.budget_bytes:
        return command_for(options, "plan", "--find-batch", *budget)
    if report.plan is not None and report.plan.techniques:
        return command_for(options, "run", "--plan", str(plan))
    return command_for(options, "diagnose")


def _hints(options: dict[str, Any], result: Result, plan: Path, following: str) -> Iterator[str]:
    """Yield what else one may type: for a budget, for a machine without a GPU, for a budget missed."""
    report = result.report
    budgeted = command_for(options, "optimize", "--memory", "60%")
    if options["memory"] is None and report.plan is None and following != budgeted:
        yield f"to fit the script into less memory: {budgeted}"
    if report.plan is None or not report.plan.techniques or _unequal(report):
        return
    profile = result.before
    if options["device"] is None and profile is not None and is_emulated(profile.device):
        budget = ("--memory", options["memory"]) if options["memory"] is not None else ()
        here = command_for(options, "optimize", *budget, "--device", "cpu")
        yield f"this machine has no GPU, so the plan is for one elsewhere; for this CPU: {here}"
    smallest = command_for(options, "run", "--plan", str(plan))
    if report.floor_bytes is not None and smallest != following:
        yield f"the plan that comes nearest runs too: {smallest}"


def _fixing(options: dict[str, Any]) -> str:
    """Return the command that writes the fixes."""
    budget = ("--memory", options["memory"]) if options["memory"] is not None else ()
    return command_for(options, "optimize", *budget, "--fix")


def _next(options: dict[str, Any], result: Result, plan: Path) -> str:
    report = result.report
    if report.floor_bytes is not None:
        return _next_of_missed(options, result, plan)
    if _unequal(report):
        return command_for(options, "diagnose")
    if result.plan is not None and (result.plan.techniques or result.plan.compiled):
        return command_for(options, "run", "--plan", str(plan))
    fixes = report.fixes
    if fixes is not None and fixes.diff and not fixes.written:
        return _fixing(options)
    return command_for(options, "optimize", "--memory", "60%")
