"""`torchtrim optimize`: the whole loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchtrim.cli.options import fits, request_of, runs_script, script_of, writes
from torchtrim.cli.output import command_for, folder_for, progress, show, write_files
from torchtrim.errors import UsageError

if TYPE_CHECKING:
    from torchtrim.api import Result

_NO_FIXES = (
    "--fix and --unsafe-fixes cure the waits of a training loop, and --mode inference plans the calls of a "
    "model. Run torchtrim twice."
)


@click.command()
@runs_script
@fits(required=False)
@writes
@click.option(
    "--mode",
    type=click.Choice(["training", "inference"]),
    default="training",
    help="inference: SCRIPT only runs a model, and its calls are planned.",
)
@click.option("--fix", is_flag=True, help="Write the cures of waits into the source.")
@click.option(
    "--unsafe-fixes",
    is_flag=True,
    help="Also cures that rest on what no run has shown, or may differ otherwise.",
)
def command(**options: Any) -> None:
    """Cure what makes SCRIPT wait and fit it into a budget: diagnose, plan, run, verify, report.

    Without --memory only waits are cured; with --mode inference the least memory is looked for. Exit
    code 1 if the budget is missed or the planned script is not equal. Arguments of the script come
    after `--`.
    """
    with progress() as tell:
        result = _optimized(options, tell)
    paths = write_files(result, folder_for(options))
    show(result, form=options["form"], next_command=_next(options, result, paths), paths=paths)
    report = result.report
    unequal = report.certificate is not None and report.certificate.verdict == "NOT EQUAL"
    raise click.exceptions.Exit(1 if report.smallest_bytes is not None or unequal else 0)


def _optimized(options: dict[str, Any], tell: Callable[[str], None]) -> Result:
    from torchtrim.api import cure_report, optimize_calls_report, optimize_report
    from torchtrim.certify.cured import with_cures

    script, request = script_of(options), request_of(options)
    write, unsafe = options["fix"], options["unsafe_fixes"]
    kind = options["memory_kind"]
    if options["mode"] == "inference":
        if write or unsafe:
            raise UsageError(_NO_FIXES)
        return optimize_calls_report(
            script, options["memory"], request, memory_kind=kind, progress=tell
        )
    cured = None
    if options["memory"] is None or write or unsafe:
        cured = cure_report(script, request, unsafe=unsafe, write=write, progress=tell)
    if options["memory"] is None:
        assert cured is not None
        return cured
    fitted = optimize_report(
        script,
        options["memory"],
        request,
        memory_kind=kind,
        cures=cured is None,
        progress=tell,
    )
    if cured is None or cured.report.cures is None:
        return fitted
    return fitted._replace(report=with_cures(fitted.report, cured.report.cures))


def _next(options: dict[str, Any], result: Result, paths: dict[str, Path]) -> str:
    report = result.report
    if report.smallest_bytes is not None:
        mode = ("--mode", "inference") if options["mode"] == "inference" else ()
        return command_for(options, "optimize", *mode, "--memory", str(report.smallest_bytes))
    cures = report.cures
    if cures is not None and cures.diff and not cures.written:
        budget = ("--memory", options["memory"]) if options["memory"] is not None else ()
        return command_for(options, "optimize", *budget, "--fix")
    if "plan" in paths:
        return command_for(options, "run", "--plan", str(paths["plan"]))
    return command_for(options, "optimize", "--memory", "60%")
