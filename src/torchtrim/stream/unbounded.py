"""Lets a program that bounds its state run as if it did not, to compare the two.

Inside `unbounded()` stores evict nothing, spill nothing and forget nothing, in any thread of the process,
while the program's own calls stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_switch = [False]
bounded: set[str] = set()
"""The bounded kinds of state in this process, by name: few however many streams there are."""


@contextmanager
def unbounded() -> Iterator[None]:
    """Bounds do nothing until this ends."""
    before, _switch[0] = _switch[0], True
    try:
        yield
    finally:
        _switch[0] = before


def is_unbounded() -> bool:
    """Whether bounds do nothing now."""
    return _switch[0]
