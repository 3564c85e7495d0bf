"""Finds the fixes. To add one, add a file to `fixes/` that defines `FIX`, or `FIXES` of one family."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from types import ModuleType

from torchtrim.core.isolation import Failure, collected, isolated, note
from torchtrim.rewriter.fix import Fix, Match
from torchtrim.source.source import Source

_HOME = "torchtrim.fixes"


def all_fixes() -> tuple[Fix, ...]:
    """Every fix of the package, by name; not those whose file cannot be imported."""
    found, failed = _imported(tuple(import_module(_HOME).__path__))
    for one in failed:
        note(one)
    return found


@cache
def _imported(folders: tuple[str, ...]) -> tuple[tuple[Fix, ...], tuple[Failure, ...]]:
    """The fixes in these folders, and what failed in importing others."""
    found: list[Fix] = []
    with collected() as failed:
        for name in sorted(one.name for one in pkgutil.iter_modules(folders)):
            with isolated("fix", name):
                found += fixes_of(import_module(f"{_HOME}.{name}"))
    return tuple(sorted(found, key=lambda fix: fix.name)), tuple(failed)


def fixes_of(home: ModuleType) -> tuple[Fix, ...]:
    """The fixes of a file: those of its family, else its only one."""
    return home.FIXES if hasattr(home, "FIXES") else (home.FIX,)


def matches(source: Source, codes: Iterable[str] | None = None) -> Iterator[Match]:
    """Every place of a source that some fix is for, by line; only fixes of `codes` where given."""
    wanted = None if codes is None else set(codes)
    chosen = [one for one in all_fixes() if wanted is None or wanted & set(one.codes)]
    found = [match for fix in chosen for match in fix.places(source)]
    return iter(sorted(found, key=lambda match: match.lines))
