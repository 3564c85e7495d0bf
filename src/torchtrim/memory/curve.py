"""The one sum of bytes: from when until when blocks of memory are alive -> bytes at each moment."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

Life = tuple[int, int, int]
"""Bytes, the first moment at which they are alive, and the first at which they no longer are."""


def bytes_over_time(moments: int, lives: Iterable[Life]) -> list[int]:
    """Bytes alive at each of the moments `0 <= i < moments`; lives may reach beyond both ends."""
    change = [0] * (moments + 1)
    for size, first, last in lives:
        first, last = max(first, 0), min(last, moments)
        if first < last:
            change[first] += size
            change[last] -= size
    return list(accumulate(change))[:moments]
