"""`torchtrim verify`: whether a planned script, or another one, computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from torchtrim.cli.options import request_of, runs_script, script_of, writes
from torchtrim.cli.output import command_for, folder_for, progress, show, write_files
from torchtrim.errors import UsageError


@click.command()
@runs_script
@writes
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), help="The plan to verify.")
def command(**options: Any) -> None:
    """Compare SCRIPT with itself under --plan, or with a second script: `verify A B`.

    Exit code 1 if they are not equal.
    """
    with progress() as tell:
        result = _verify(options, tell)
    paths = write_files(result, folder_for(options))
    following = None
    if options["plan_path"] is not None:
        following = command_for(options, "run", "--plan", str(options["plan_path"]))
    show(result, form=options["form"], next_command=following, paths=paths)
    certificate = result.report.certificate
    assert certificate is not None
    raise click.exceptions.Exit(1 if certificate.verdict == "NOT EQUAL" else 0)


def _verify(options: dict[str, Any], tell: Any) -> Any:
    from torchtrim.api import verify_report, verify_scripts
    from torchtrim.records.files import load_plan

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
    return verify_scripts(script._replace(args=script.args[1:]), other, request, progress=tell)
