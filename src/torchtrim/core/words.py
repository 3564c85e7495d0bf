"""Lists of names in sentences, first lines, and the known names nearest to a misspelt one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable


def listed(words: Collection[object], most: int | None = None) -> str:
    """Join words: `"a"`, `"a and b"`, `"a, b and c"`; of more than `most`, `"a, b and 3 more"`."""
    shown = [str(word) for word in words]
    if most is not None and len(shown) > most:
        shown[most:] = [f"{len(shown) - most} more"]
    *others, last = shown or [""]
    return f"{', '.join(others)} and {last}" if others else last


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; torch's own have many. Empty if it has none."""
    return next(iter(str(error).splitlines()), "")


def nearest(word: str, known: Iterable[str], most: int = 3, least: float = 0.6) -> list[str]:
    """Return the known names most similar to a word, of at least this similarity. Case does not matter."""
    names = {as_key(name): name for name in known}
    return [names[one] for one in difflib.get_close_matches(as_key(word), names, most, least)]


def did_you_mean(
    word: str,
    known: Iterable[str],
    *,
    most: int = 3,
    shown: Callable[[str], str] = str,
) -> str:
    """Return the question `" Did you mean a or b?"` with the names nearest to a word, or an empty string."""
    near = nearest(word, known, most)
    return f" Did you mean {' or '.join(map(shown, near))}?" if near else ""


def as_key(word: str) -> str:
    """Return a word without the differences that do not matter: case, blanks, underscores and dashes."""
    return re.sub(r"[\s_-]+", " ", word.strip().casefold())
