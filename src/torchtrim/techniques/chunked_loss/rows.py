"""How many rows the chunks have."""

from __future__ import annotations

_ROWS, _ELEMENTS = 256, 2**20


def rows_for(count: int, classes: int) -> int:
    """How many rows at a time: enough to keep matrix products quick, few enough to be small."""
    return max(1, min(count, max(_ROWS, _ELEMENTS // max(classes, 1))))
