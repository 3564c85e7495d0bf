"""Commands that a person is told to run: quoted for a shell, with no path that reads as an option."""

from __future__ import annotations

import re
import shlex

_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|[^ '"])+""")


def path_argument(path: str) -> str:
    """The path as an argument: one that begins with a dash would be read as an option."""
    return f"./{path}" if path.startswith("-") else path


def quoted(path: str) -> str:
    """The path as a word of a shell's command line."""
    return shlex.quote(path_argument(path))


def shell_words(command: str) -> list[str]:
    """The words of a command line, still quoted: between them a line may end."""
    return _WORD.findall(command)
