"""`torchtrim undo`: revert the last write of source."""

from __future__ import annotations

from pathlib import Path

import click

from torchtrim.cli.options import tell


@click.command()
@click.argument("path", type=click.Path(path_type=Path), default=".")
def command(path: Path) -> None:
    """Undo the last write of source (`--fix`) in the project around PATH, by default the current folder.

    A file that was edited since then stays unchanged; the diff to apply by hand is printed on stdout, and
    the exit code is 1.
    """
    from torchtrim.api import undo

    undone = undo(path)
    for note in undone.notes:
        tell(f"note: {note}")
    for restored in undone.restored:
        tell(f"restored: {restored}")
    for refused, reason, diff in undone.refused:
        tell(f"not undone: {refused}: {reason}. Apply this diff by hand:")
        click.echo(diff, nl=False)
    if not undone.restored and not undone.refused and not undone.notes:
        tell("nothing to undo: the files already equal those before the write.")
    raise click.exceptions.Exit(1 if undone.refused else 0)
