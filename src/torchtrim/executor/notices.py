"""Messages about assumptions of a plan that stop to hold while the program runs."""

from __future__ import annotations

import sys
from collections.abc import Callable

_SAID: set[tuple[str, str]] = set()
listeners: list[Callable[[str, str], None]] = []
"""Called with the place and the message of each notice."""


def say(where: str, said: str) -> None:
    """Print a message about a place of the plan to stderr."""
    print(f"torchtrim: `{where}`: {said}", file=sys.stderr, flush=True)
    for listener in listeners:
        listener(where, said)


def say_once(where: str, said: str) -> None:
    """Print a message about a place of the plan to stderr, unless this process has printed it before."""
    if (where, said) not in _SAID:
        _SAID.add((where, said))
        say(where, said)
