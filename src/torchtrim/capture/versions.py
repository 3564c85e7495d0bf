"""Which versions of torch torchtrim was tested with, and what to say of another."""

from __future__ import annotations

import re

OLDEST, NEWEST = (2, 11), (2, 15)


def untested(version: str) -> str | None:
    """What to say of a version of torch that no test has run with; None for one that was tested."""
    found = re.match(r"(\d+)\.(\d+)", version)
    here = (int(found[1]), int(found[2])) if found else (0, 0)
    if OLDEST <= here <= NEWEST:
        return None
    than = "older" if here < OLDEST else "newer"
    return (
        f"torch {version} is {than} than what torchtrim was tested with "
        f"({_words(OLDEST)} to {_words(NEWEST)}). What it records may be incomplete; the certificate still "
        "compares every bit."
    )


def _words(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
