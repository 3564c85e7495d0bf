"""`torchtrim run`: the script itself, with a plan applied."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchtrim.cli.options import undo_interrupted
from torchtrim.cli.output import PLAN, own_folder, remember_call
from torchtrim.cli.plans import advising, loaded_plan
from torchtrim.cli.script_options import check_passed
from torchtrim.core.scripts import check_script_file
from torchtrim.errors import UsageError
from torchtrim.records.commands import path_argument

if TYPE_CHECKING:
    from torchtrim.api import Script
    from torchtrim.records.plan import Plan


class _Run(click.Command):
    """The verb that passes options it does not have to the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Raises `UsageError` for an option that may be in the wrong place."""
        check_passed(self, "run", args)
        return super().parse_args(ctx, args)


@click.command(cls=_Run, context_settings={"ignore_unknown_options": True})
@click.option(
    "--plan",
    "plan_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Plan to apply, such as torchtrim-out/train/plan.toml. Default: none, which changes nothing.",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module name, as in python -m.")
@click.option(
    "--processes",
    type=click.IntRange(1, 1024),
    default=1,
    metavar="N",
    help="Run SCRIPT as N ranks on this machine, as torchrun does.",
)
@click.option(
    "--verify-every",
    "every",
    type=click.IntRange(1),
    metavar="N",
    help="Compare every N-th step with the original: in copies of the process, on a GPU module by module.",
)
@click.option(
    "--on-difference",
    type=click.Choice(["stop", "revert"]),
    default="stop",
    help="If a step would differ: save the state and stop, or revert the plan and continue.",
)
@click.option(
    "--on-oom",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="If a GPU's memory runs out, write a snapshot to FILE, such as oom.pickle, and say who held it.",
)
@click.option("--quiet", is_flag=True, help="Say nothing about the plan on stderr.")
@click.option("--verbose", is_flag=True, help="Name each place of the plan and each assumption.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(**options: Any) -> None:
    """Run SCRIPT as python would, with the plan that `optimize` wrote.

    The plan is applied when the script's models first run. Says on stderr what it changes and, in the end,
    the peak against the budget, the time against the prediction, and what was checked. The exit code is the
    script's own; with several ranks, the first failing rank's. Put the script's arguments after `--`.
    """
    if not options["module"]:
        check_script_file(options["script"])
    remember_call(options)
    path: Path | None = options["plan_path"]
    plan = loaded_plan(path, options) if path is not None else None
    from torchtrim.api import Script  # it imports torch

    script = Script(options["script"], tuple(options["args"]), options["module"])
    undo_interrupted(script.path or Path.cwd())
    with advising(plan):
        _run(options, script, plan)


def _run(options: dict[str, Any], script: Script, plan: Plan | None) -> None:
    from torchtrim.api import RunReport, check_script, launch, run_checked, run_planned

    if plan is not None:
        check_script(plan, script)
    elif not options["quiet"]:
        _tell_of_plan(options)
    if options["processes"] > 1:
        if options["every"] is not None:
            raise UsageError(
                "--verify-every compares the steps of one process, but --processes starts several. Pass "
                "only one of them; `torchtrim verify` with --processes compares all ranks beforehand."
            )
        words = ["--plan", str(options["plan_path"])] if plan is not None else []
        words += [f"--{name}" for name in ("quiet", "verbose") if options[name]]
        words += ["--on-oom", str(options["on_oom"])] if options["on_oom"] else []
        words += ["-m", script.target] if script.module else [path_argument(script.target)]
        command_line = ["run", *words, "--", *script.args]
        raise click.exceptions.Exit(launch(command_line, options["processes"]))
    report = None
    if plan is not None and not options["quiet"]:
        report = RunReport(
            plan, options["plan_path"], args=options["args"], verbose=options["verbose"]
        )
    with _explained_oom(options["on_oom"]):
        if options["every"] is not None:
            run_checked(script, plan, options["every"], options["on_difference"], report)
        else:
            run_planned(script, plan, report=report)


def _tell_of_plan(options: dict[str, Any]) -> None:
    """Say that the script runs unchanged although `optimize` left a plan for it."""
    path = own_folder(options) / PLAN
    if path.is_file() and os.environ.get("RANK", "0") == "0":
        click.echo(
            f"torchtrim: without --plan the script runs unchanged; there is --plan {path}", err=True
        )


_EVENTS = 100_000  # PyTorch's own default; with their stacks some 100 MiB of host memory.


@contextlib.contextmanager
def _explained_oom(path: Path | None) -> Iterator[None]:
    """Record the allocator's requests; when memory runs out, write a snapshot, and in the end its story."""
    if path is None:
        yield
        return
    import torch

    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None or not torch.cuda.is_available():
        click.echo("torchtrim: --on-oom: found no GPU, so no snapshot will be written", err=True)
        yield
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        path = path.with_stem(f"{path.stem}-rank{os.environ.get('RANK', '0')}")
    written: list[Path] = []

    def dump(*_: object) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
            written.append(path)
        except Exception as error:  # The script's own error matters more.
            click.echo(f"torchtrim: --on-oom: the snapshot was not written: {error}", err=True)

    torch.cuda.memory._record_memory_history(max_entries=_EVENTS)
    attach(dump)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
        if written:
            _tell_oom(path)


def _tell_oom(path: Path) -> None:
    from torchtrim.api import snapshot_report
    from torchtrim.cli.output import show_snapshot

    click.echo(f"torchtrim: memory ran out; the snapshot is {path}", err=True)
    try:
        show_snapshot(snapshot_report(path), _HOLDERS, on_stderr=True)
    except Exception as error:  # The script's own error matters more.
        click.echo(f"torchtrim: the snapshot could not be explained: {error}", err=True)


_HOLDERS = 8
