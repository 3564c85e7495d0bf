"""How a batch of channels is laid out in memory, and which of them run together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Layout = Literal["contiguous", "channels last"]
_WITH_LAST = (4, 5)
"""How many dimensions torch has channels last of."""
_TOGETHER = 32
"""Channels that lie side by side are computed in groups of at most so many: a part has whole groups."""


def spans_of(count: int, layout: Layout, parts: int) -> tuple[tuple[int, int], ...]:
    """The first channel and the end of each part; where channels are last, of whole groups.

    No part is of one channel: it would lie in both ways.
    """
    size = max(-(-count // parts), 2)
    if layout == "channels last":
        size = -(-size // _TOGETHER) * _TOGETHER
    ends = [*range(size, count - 1, size), count]
    return tuple(zip([0, *ends], ends, strict=False))


def layout_of(shape: Sequence[int], strides: Sequence[int]) -> Layout | None:
    """The layout of a tensor of these strides, in elements; None where torch would not make it so.

    A dimension of one place has its stride too: kernels choose by it.
    """
    batch, channels, *places = range(len(shape))
    if tuple(strides) == _strides(shape, (batch, channels, *places)):
        return "contiguous"
    last = len(shape) in _WITH_LAST and _strides(shape, (batch, *places, channels))
    return "channels last" if tuple(strides) == last else None


def _strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides where the dimensions lie one in the other, the last of the order innermost."""
    found, step = [0] * len(shape), 1
    for dimension in reversed(order):
        found[dimension] = step
        step *= max(shape[dimension], 1)
    return tuple(found)
