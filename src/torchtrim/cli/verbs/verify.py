"""`torchtrim verify`: whether a planned script, or another one, computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchtrim.cli.options import (
    Verb,
    counts_frames,
    orders_streams,
    request_of,
    runs_script,
    script_of,
    writes,
)
from torchtrim.cli.output import command_for, folder_for, progress, show, write_files
from torchtrim.errors import UsageError

if TYPE_CHECKING:
    from torchtrim.api import Result


@click.command(cls=Verb)
@runs_script
@orders_streams
@writes
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), help="The plan to verify.")
@click.option(
    "--check",
    is_flag=True,
    help="SCRIPT is a certificate.json of an earlier verify: repeat it, and say whether it still holds.",
)
@click.option(
    "--stream",
    is_flag=True,
    help="SCRIPT streams: compare its frames with its state bounded and without bounds.",
)
@counts_frames
def command(**options: Any) -> None:
    """Compare SCRIPT with itself under --plan, or with a second script: `verify A B`.

    With --stream the state of SCRIPT's stream is bounded, as it says itself, as --plan says, or by what
    torchtrim knows of its models, and compared frame by frame with the same stream without bounds.
    With --check an earlier certificate is repeated, with its scripts, steps and device: whether it still
    holds, and what has changed since. Exit code 1 if they are not equal, or it no longer holds.
    """
    folder = folder_for(options)
    with progress() as tell:
        result, right = _verify(options, tell)
    paths = write_files(result, folder)
    following = None
    if options["plan_path"] is not None and not options["stream"]:
        following = command_for(options, "run", "--plan", str(options["plan_path"]))
    show(result, form=options["form"], next_command=following, paths=paths)
    raise click.exceptions.Exit(0 if right else 1)


def _verify(options: dict[str, Any], tell: Any) -> tuple[Result, bool]:
    """The result, and whether it is as it should be."""
    if options["check"]:
        return _check(options, tell)
    result = _compare(options, tell)
    certificate = result.report.certificate
    assert certificate is not None
    return result, certificate.verdict != "NOT EQUAL"


def _check(options: dict[str, Any], tell: Any) -> tuple[Result, bool]:
    from torchtrim.api import check_certificate

    if any(options[name] for name in ("plan_path", "stream", "args", "module", "device")):
        raise UsageError(
            "--check takes a certificate and nothing else: its scripts, plan, steps and device are in it."
        )
    path = Path(options["script"])
    holds, result = check_certificate(path, timeout=options["timeout"], progress=tell)
    return result, holds


def _compare(options: dict[str, Any], tell: Any) -> Result:
    from torchtrim.api import verify_pair, verify_report
    from torchtrim.records.files import load_plan

    if options["stream"]:
        return _verify_stream(options, tell)
    script, request = script_of(options), request_of(options)
    if options["plan_path"] is not None:
        plan = load_plan(options["plan_path"])
        return verify_report(script, plan, request, progress=tell)
    if not script.args:
        raise UsageError(
            "verify needs something to compare with: --plan FILE, or a second script, as in "
            "`torchtrim verify A.py B.py`."
        )
    other = script._replace(target=script.args[0], args=script.args[1:])
    for one in (script, other):
        one.check()
    return verify_pair(script._replace(args=script.args[1:]), other, request, progress=tell)


def _verify_stream(options: dict[str, Any], tell: Any) -> Result:
    from torchtrim.api import StreamRequest, check_script, compared_report
    from torchtrim.records.files import load_plan

    script = script_of(options)
    plan = load_plan(options["plan_path"]) if options["plan_path"] is not None else None
    if plan is not None:
        check_script(plan, script)
    request = StreamRequest(options["frames"], options["frames_of"], plan)
    return compared_report(script, request, tell)
