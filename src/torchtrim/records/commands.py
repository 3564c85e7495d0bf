"""Commands shown to the user: quoted for a shell, and safe from paths that look like options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|[^ '"])+""")


def path_argument(path: str) -> str:
    """Return the path as an argument that is not parsed as an option, even if it starts with a dash."""
    return f"./{path}" if path.startswith("-") else path


def quoted(path: str) -> str:
    """Return the path quoted as one shell word."""
    return shlex.quote(path_argument(path))


def from_here(path: Path) -> Path:
    """Return the path relative to the current folder if it is inside."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def shell_words(command: str) -> list[str]:
    """Split a command line into words, still quoted; a line may break between them."""
    return _WORD.findall(command)
