"""`torchtrim run`: the script itself, planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from torchtrim.cli.options import put_right
from torchtrim.errors import UsageError
from torchtrim.records.commands import path_argument


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True})
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), help="The plan to apply.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.option(
    "--processes",
    type=click.IntRange(1, 1024),
    default=1,
    metavar="N",
    help="Run SCRIPT as N ranks, as torchrun would on one machine.",
)
@click.option(
    "--verify-every",
    "every",
    type=click.IntRange(1),
    metavar="N",
    help="Compare every N-th step with the original's, in copies of the process, before it runs.",
)
@click.option(
    "--on-difference",
    type=click.Choice(["stop", "revert"]),
    default="stop",
    help="Before a step that differs: stop the run, its state saved, or revert the plan and go on.",
)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(**options: Any) -> None:
    """Run SCRIPT as python would, with a plan applied when its models first run.

    The exit code is the script's own, of several ranks that of the first that fails. Arguments of the script
    come after `--`.
    """
    from torchtrim.api import Script, check_script, launch, run_checked, run_planned
    from torchtrim.records.files import load_plan

    script = Script(options["script"], tuple(options["args"]), options["module"])
    script.check()
    put_right(script.path or Path.cwd())
    plan = load_plan(options["plan_path"]) if options["plan_path"] is not None else None
    if plan is not None:
        check_script(plan, script)
    if options["processes"] > 1:
        _check_alone(options)
        raise click.exceptions.Exit(launch(_of_a_rank(options), options["processes"]))
    if options["every"] is not None:
        run_checked(script, plan, options["every"], options["on_difference"])
    else:
        run_planned(script, plan)


def _check_alone(options: dict[str, Any]) -> None:
    if options["every"] is not None:
        raise UsageError(
            "--verify-every compares the steps of one process, and --processes starts several. Give one "
            "of them; `torchtrim verify` with --processes compares all ranks beforehand."
        )


def _of_a_rank(options: dict[str, Any]) -> list[str]:
    """The command line of each rank."""
    plan = ["--plan", str(options["plan_path"])] if options["plan_path"] is not None else []
    module = ["-m"] if options["module"] else []
    script = options["script"] if options["module"] else path_argument(options["script"])
    return ["run", *plan, *module, script, "--", *options["args"]]
