"""Finds the cures. To add one, add a file to `cures/` that defines `CURE`."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
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


def matches(source: Source) -> Iterator[Match]:
    """Every place of a source that some cure is for, by line."""
    found = [match for cure in all_cures() for match in cure.find(source)]
    return iter(sorted(found, key=lambda match: match.lines))
