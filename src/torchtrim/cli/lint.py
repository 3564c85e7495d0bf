"""`torchtrim lint`: what would wait for a device, from the source alone."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchtrim.records.report import Report
    from torchtrim.rewrite.lint_files import FixedFiles, Linted

FORMATS = ("full", "concise", "json", "sarif", "github")


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--fix", is_flag=True, help="Write the cures that are safe without a run into the source."
)
@click.option(
    "--unsafe-fixes", is_flag=True, help="Write also cures that rest on what no run has shown."
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
    help="What stands on stdout; full by default.",
)
def command(**options: Any) -> None:
    """Find what in PATHS would wait for a device, without running it.

    Exit code 1 if there is a finding, 2 if a file cannot be read. `# torchtrim: ignore[TT101]` on a line
    leaves it out.
    """
    from torchtrim.rewrite.lint_files import (
        Selected,
        files_of,
        fix_files,
        lint_files,
        project_of,
        write_fixed,
    )

    selected = Selected(options["select"].split(","))
    files = files_of(options["paths"])
    project = project_of(options["paths"])
    fixes = options["fix"] or options["unsafe_fixes"]
    fixed = None
    if fixes or options["diff"]:
        fixed = fix_files(files, selected, project, unsafe=options["unsafe_fixes"])
        if not options["diff"]:
            write_fixed(fixed, project)
    linted = lint_files(files, selected)
    _show(linted, fixed, options)
    unreadable = any(one.error for one in linted)
    found = any(one.findings for one in linted)
    raise click.exceptions.Exit(2 if unreadable else 1 if found else 0)


def _show(linted: Sequence[Linted], fixed: FixedFiles | None, options: dict[str, Any]) -> None:
    report = _report(linted, options["paths"])
    if options["diff"] and fixed is not None:
        click.echo(fixed.diff(report.project), nl=False)
    else:
        click.echo(_rendered(report, options["form"]), nl=False)
    for one in linted:
        if one.error:
            _tell(f"error: {one.error}")
    for path, reason in sorted(fixed.refused.items()) if fixed is not None else ():
        _tell(f"not edited: {path}: {reason}")
    _tell(_summary(report, fixed, wrote=not options["diff"]))


def _tell(text: str) -> None:
    from torchtrim.report.safe import clean

    click.echo(clean(text, sys.stderr.encoding or "utf-8"), err=True)


def _report(linted: Sequence[Linted], paths: Sequence[Path]) -> Report:
    import msgspec

    from torchtrim import __version__
    from torchtrim.records.report import Report
    from torchtrim.rewrite.lint_files import relative

    base = str(Path.cwd())
    findings = tuple(
        msgspec.structs.replace(
            found, path=relative(found.path, base), cure=_near(found.cure, base)
        )
        for one in linted
        for found in one.findings
    )
    return Report(
        torchtrim=__version__,
        torch=version("torch"),
        verb="lint",
        device="",
        script=", ".join(map(str, paths)),
        steps=0,
        project=base,
        findings=findings,
        notes=tuple(one.error for one in linted if one.error),
    )


def _near(cure: Any, base: str) -> Any:
    import msgspec

    if cure is None or not cure.diff:
        return cure
    diff = cure.diff.replace(f"--- a/{base}/", "--- a/").replace(f"+++ b/{base}/", "+++ b/")
    return msgspec.structs.replace(cure, diff=diff)


def _rendered(report: Report, form: str) -> str:
    from torchtrim.report import github, json, lint_text, sarif
    from torchtrim.rules.source import Source

    encoding = sys.stdout.encoding or "utf-8"
    if form == "json":
        return json.render(report).decode()
    if form == "sarif":
        return sarif.render(report, line_text=Source(report.project).line)
    if form == "github":
        return github.render(report)
    return (
        lint_text.concise(report, encoding)
        if form == "concise"
        else lint_text.full(report, encoding)
    )


def _summary(report: Report, fixed: FixedFiles | None, *, wrote: bool) -> str:
    from torchtrim.report.lint_text import mark

    count = len(report.findings)
    safe = sum(mark(found) == "[*] " for found in report.findings)
    unsafe = sum(mark(found) == "[?] " for found in report.findings)
    parts = [f"{count} finding{'' if count == 1 else 's'}" if count else "nothing found"]
    if fixed is not None and fixed.made:
        parts.append(f"{fixed.made} {'cured' if wrote else 'would be cured'}")
    if fixed is None and safe:
        parts.append(f"{safe} with a cure that --fix makes")
    if fixed is None and unsafe:
        parts.append(f"{unsafe} with one that --unsafe-fixes makes")
    return ", ".join(parts)
