"""`torchtrim undo`: takes out the last write of source."""

from __future__ import annotations

from pathlib import Path

import click

from torchtrim.cli.options import tell


@click.command()
@click.argument("path", type=click.Path(path_type=Path), default=".")
def command(path: Path) -> None:
    """Undo the last write of source (`--fix`) in the project around PATH, by default the current folder.

    A file that was edited since is left as it is; the diff to apply by hand is then on stdout. Exit code
    1 if there is one.
    """
    from torchtrim.api import undo

    undone = undo(path)
    for note in undone.notes:
        tell(f"note: {note}")
    for restored in undone.restored:
        tell(f"as it was: {restored}")
    for refused, reason, diff in undone.refused:
        tell(f"not undone: {refused}: {reason}. What would be undone:")
        click.echo(diff, nl=False)
    if not undone.restored and not undone.refused and not undone.notes:
        tell("nothing was changed: the files are as they were before the write already.")
    raise click.exceptions.Exit(1 if undone.refused else 0)
