"""`torchtrim verify`: compare a planned script, or a second script, with the original."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from torchtrim.cli.options import (
    Verb,
    counts_frames,
    orders_streams,
    request_of,
    runs_script,
    script_of,
    writes,
)
from torchtrim.cli.output import command_for, folder_for, followed, remember_call, show, write_files
from torchtrim.cli.plans import advising, certify_file, check_plan, loaded_plan
from torchtrim.cli.progress import progress
from torchtrim.errors import UsageError

if TYPE_CHECKING:
    from torchtrim.api import Result


_CODES = {"NOT EQUAL": 1, "UNDECIDED": 4}


@click.command(cls=Verb)
@runs_script
@orders_streams
@writes
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), help="Plan to verify.")
@click.option(
    "--check",
    is_flag=True,
    help="SCRIPT is the certificate.json of an earlier verify: repeat it, and check that it still holds.",
)
@click.option(
    "--stream",
    is_flag=True,
    help="SCRIPT is a stream: compare its frames with bounded and unbounded state.",
)
@counts_frames
def command(**options: Any) -> None:
    """Compare what SCRIPT computes with itself under --plan, or with a second script: `verify A.py B.py`.

    The verdict on a plan is written into its file, under [certified].

    With --stream, bounds the state of SCRIPT's stream as the script or --plan specifies, or as torchtrim
    knows its models, and compares it frame by frame with the unbounded stream. With --check, repeats an
    earlier certificate with its scripts, steps and device, and reports changes since. Exit code 1 if the
    results differ, or the certificate no longer holds; 4 if it is undecided whether they do.
    """
    other = options["args"][:1]
    if (
        options["plan_path"] is None
        and not options["check"]
        and other
        and other[0].endswith(".toml")
    ):
        raise UsageError(
            f"{other[0]} is a plan, not a script. To verify it: "
            + command_for({**options, "args": options["args"][1:]}, "verify", "--plan", other[0])
        )
    if options["plan_path"] is not None:
        check_plan(options["plan_path"], options)
    folder = folder_for(options)
    planned = options["plan_path"] is not None or options["check"]
    with progress("original", "planned" if planned else "the other") as tell:
        if options["check"]:
            holds, result = _check(options, tell)
            code = 0 if holds else 1
        else:
            result = (_verify_stream if options["stream"] else _compare)(options, tell)
            assert result.report.certificate is not None
            code = _CODES.get(result.report.certificate.verdict, 0)
    following = None
    if options["plan_path"] is not None and not options["stream"]:
        notes = certify_file(options["plan_path"], result)
        result = result._replace(
            report=replace(result.report, notes=(*notes, *result.report.notes))
        )
        following = command_for(options, "run", "--plan", str(options["plan_path"]))
    result = followed(result, following)
    paths = write_files(result._replace(plan=None), folder)  # it stays in its own file
    show(result, form=options["form"], next_command=following, paths=paths)
    raise click.exceptions.Exit(code)


def _check(options: dict[str, Any], tell: Any) -> tuple[bool, Result]:
    from torchtrim.api import check_certificate

    if any(options[name] for name in ("plan_path", "stream", "args", "module", "device")):
        raise UsageError(
            "--check takes only a certificate, which names its scripts, plan, steps and device."
        )
    return check_certificate(Path(options["script"]), timeout=options["timeout"], progress=tell)


def _compare(options: dict[str, Any], tell: Any) -> Result:
    from torchtrim.api import verify_pair, verify_report

    script, request = script_of(options), request_of(options)
    if options["plan_path"] is not None:
        plan = loaded_plan(options["plan_path"], options)
        with advising(plan):
            return verify_report(script, plan, request, progress=tell)
    if not script.args:
        raise UsageError(
            "verify needs --plan FILE or a second script to compare with, as in "
            "`torchtrim verify A.py B.py`."
        )
    other = script._replace(target=script.args[0], args=script.args[1:])
    for one in (script, other):
        one.check()
    remember_call({**options, "args": script.args[1:]})
    return verify_pair(script._replace(args=script.args[1:]), other, request, progress=tell)


def _verify_stream(options: dict[str, Any], tell: Any) -> Result:
    from torchtrim.api import StreamRequest, check_script, compared_report

    script = script_of(options)
    path: Path | None = options["plan_path"]
    plan = loaded_plan(path, options) if path is not None else None
    if plan is not None:
        check_script(plan, script)
    request = StreamRequest(options["frames"], options["frames_of"], plan)
    return compared_report(script, request, tell)
