"""Source that is written: what a killed run left is put right first, what this run wrote is said last."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from torchtrim.cli.output import cleaned, own_command
from torchtrim.records.commands import path_argument

if TYPE_CHECKING:
    from torchtrim.api import Watch

_watches: list[tuple[Watch, Path]] = []


def tell(text: str) -> None:
    """Say something on stderr, made harmless."""
    click.echo(cleaned(text, sys.stderr.encoding or "utf-8"), err=True)


def put_right(start: Path) -> None:
    """See to a write of source that was killed, and say so."""
    from torchtrim.api import settle

    for note in settle(start):
        tell(f"note: {note}")


def watch(start: Path) -> None:
    """Say at the end of this run what it wrote around a path, however it ends."""
    from torchtrim.api import Watch

    _watches.append((Watch(start), start))


def said_of_writes() -> str:
    """What was written into source since it was watched, and how to undo it; empty for nothing."""
    lines = []
    for watched, _ in _watches:
        paths = [_near(path) for path in watched.written()]
        if paths:
            count = "" if len(paths) == 1 else f"{len(paths)} files: "
            undo = own_command("undo", path_argument(paths[0]))
            lines.append(f"source written: {count}{', '.join(paths)}. Undo: {undo}")
    _watches.clear()
    return "\n".join(lines)


def _near(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
