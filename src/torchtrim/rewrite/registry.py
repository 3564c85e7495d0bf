"""Finds the cures. To add one, add a file to `cures/` that defines `CURE`."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module

from torchtrim.rewrite import cures
from torchtrim.rewrite.base import Cure, Match
from torchtrim.rewrite.source import Source


@cache
def all_cures() -> tuple[Cure, ...]:
    """Every cure of the package, by name."""
    names = sorted(found.name for found in pkgutil.iter_modules(cures.__path__))
    return tuple(import_module(f"{cures.__name__}.{name}").CURE for name in names)


def matches(source: Source, codes: Iterable[str] | None = None) -> Iterator[Match]:
    """Every place of a source that some cure is for, by line; only cures of `codes` where given."""
    wanted = None if codes is None else set(codes)
    cures = [one for one in all_cures() if wanted is None or wanted & set(one.codes)]
    found = [match for cure in cures for match in cure.places(source)]
    return iter(sorted(found, key=lambda match: match.lines))
