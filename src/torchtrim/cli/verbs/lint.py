"""`torchtrim lint`: host-device syncs, found in the source without a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchtrim.cli.options import tell, undo_interrupted, watch
from torchtrim.cli.output import formats, lint_marks, rendered_lint

if TYPE_CHECKING:
    from torchtrim.api import Checked


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--fix", is_flag=True, help="Write the fixes that are safe without a run into the source."
)
@click.option(
    "--unsafe-fixes", is_flag=True, help="Also write fixes that only a run could confirm."
)
@click.option(
    "--diff", is_flag=True, help="Print the changes of --fix as a diff without writing them."
)
@click.option(
    "--select",
    metavar="CODES",
    default="TT",
    help="Report only these codes or prefixes: TT101,TT102 or TT10.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(("full", "concise", *formats())),
    default="full",
    help="Format of the output on stdout. Default: full.",
)
@click.option("--no-cache", is_flag=True, help="Read every file again, and do not write a cache.")
def command(**options: Any) -> None:
    """Find host-device syncs in PATHS without running them.

    Exit code 1 if there are findings, 2 if a file cannot be read. The comment `# torchtrim: ignore[TT101]`
    excludes a line.
    """
    from torchtrim.api import lint_report

    undo_interrupted(options["paths"][0])
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
    parts = [f"{count} finding{'' if count == 1 else 's'}" if count else "no findings"]
    if fixed is not None and fixed.applied:
        parts.append(f"{fixed.applied} {'fixed' if wrote else 'would be fixed'}")
    if fixed is None and safe:
        parts.append(f"{safe} fixable with --fix")
    if fixed is None and unsafe:
        parts.append(f"{unsafe} fixable with --unsafe-fixes")
    return ", ".join(parts)
