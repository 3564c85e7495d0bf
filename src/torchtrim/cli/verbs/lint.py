"""`torchtrim lint`: host-device syncs, from the source alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchtrim.cli.options import put_right, tell, watch
from torchtrim.cli.output import lint_marks, rendered_lint

if TYPE_CHECKING:
    from torchtrim.api import Checked

FORMATS = ("full", "concise", "json", "sarif", "github")


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--fix", is_flag=True, help="Write the fixes that are safe without a run into the source."
)
@click.option(
    "--unsafe-fixes", is_flag=True, help="Write also fixes that rest on what no run has shown."
)
@click.option("--diff", is_flag=True, help="Show what --fix would change, and change nothing.")
@click.option(
    "--select", metavar="CODES", default="TT", help="Only these codes: TT101,TT102 or TT10."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="full",
    help="Format of stdout; full by default.",
)
@click.option("--no-cache", is_flag=True, help="Read every file anew, and keep nothing.")
def command(**options: Any) -> None:
    """Find host-device syncs in PATHS without running them.

    Exit code 1 if there is a finding, 2 if a file cannot be read. `# torchtrim: ignore[TT101]` on a line
    leaves it out.
    """
    from torchtrim.api import lint_report

    put_right(options["paths"][0])
    watch(options["paths"][0])
    checked = lint_report(
        options["paths"],
        options["select"].split(","),
        fix=options["fix"] or options["unsafe_fixes"] or options["diff"],
        unsafe=options["unsafe_fixes"],
        write=not options["diff"],
        cached=not options["no_cache"],
    )
    _show(checked, options)
    raise click.exceptions.Exit(2 if checked.errors else 1 if checked.report.findings else 0)


def _show(checked: Checked, options: dict[str, Any]) -> None:
    report, fixed = checked.report, checked.fixed
    if options["diff"] and fixed is not None:
        click.echo(fixed.diff(report.project), nl=False)
    else:
        click.echo(rendered_lint(report, options["form"]), nl=False)
    for error in checked.errors:
        tell(f"error: {error}")
    for path, reason in sorted(fixed.refused.items()) if fixed is not None else ():
        tell(f"not edited: {path}: {reason}")
    tell(_summary(checked, wrote=not options["diff"]))


def _summary(checked: Checked, *, wrote: bool) -> str:
    fixed, marks = checked.fixed, lint_marks(checked.report)
    count, safe, unsafe = len(marks), marks.count("[*] "), marks.count("[?] ")
    parts = [f"{count} finding{'' if count == 1 else 's'}" if count else "nothing found"]
    if fixed is not None and fixed.applied:
        parts.append(f"{fixed.applied} {'fixed' if wrote else 'would be fixed'}")
    if fixed is None and safe:
        parts.append(f"{safe} with a fix that --fix applies")
    if fixed is None and unsafe:
        parts.append(f"{unsafe} with one that --unsafe-fixes applies")
    return ", ".join(parts)
