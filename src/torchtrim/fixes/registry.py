"""Finds the fixes. To add one, add a file beside this one that defines `FIX`."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module

from torchtrim import fixes
from torchtrim.fixes.base import Fix, Match
from torchtrim.fixes.reading.source import Source

_SERVING = frozenset(("advice", "base", "pages", "registry"))


@cache
def all_fixes() -> tuple[Fix, ...]:
    """Every fix of the package, by name."""
    found = pkgutil.iter_modules(fixes.__path__)
    names = sorted(one.name for one in found if not one.ispkg and one.name not in _SERVING)
    return tuple(import_module(f"{fixes.__name__}.{name}").FIX for name in names)


def matches(source: Source, codes: Iterable[str] | None = None) -> Iterator[Match]:
    """Every place of a source that some fix is for, by line; only fixes of `codes` where given."""
    wanted = None if codes is None else set(codes)
    chosen = [one for one in all_fixes() if wanted is None or wanted & set(one.codes)]
    found = [match for fix in chosen for match in fix.places(source)]
    return iter(sorted(found, key=lambda match: match.lines))
