"""Greedy placement: each buffer goes into a gap left by those placed before it, in several orders.

Largest first into the tightest gap is TFLite's strategy (Pisarchyk and Lee, arXiv 2001.03288). No order is
best for all problems, so several are tried and the lowest packing wins.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from typing import Any

from torchtrim.memory.packing.buffers import PackingProblem


def place(order: Any, rows: Any, tightest: bool, offsets: Any, work: Any) -> int:
    """Place buffers in this order, each in the first or the tightest gap, and return the height.

    rows: lower, upper, size and align. offsets: written. work: four arrays as long as the order.
    """
    lower, upper, size, align = rows
    lows, highs, starts, ends = work
    height = 0
    for count in range(len(order)):
        b = order[count]
        low, high, need, step = lower[b], upper[b], size[b], align[b]
        best, least, top = -1, -1, 0
        for i in range(count):
            if lows[i] < high and highs[i] > low:
                gap = starts[i] - top
                if gap >= need and (least < 0 or gap < least):
                    best, least = top, gap
                    if not tightest:
                        break
                if ends[i] > top:
                    top = ends[i] if step == 1 else -(-ends[i] // step) * step
        offset = top if least < 0 else best
        offsets[b] = offset
        height = max(height, offset + need)
        at = count
        while at > 0 and starts[at - 1] > offset:
            lows[at], highs[at] = lows[at - 1], highs[at - 1]
            starts[at], ends[at] = starts[at - 1], ends[at - 1]
            at -= 1
        lows[at], highs[at], starts[at], ends[at] = low, high, offset, offset + need
    return height


def place_in_lists(order: Any, rows: Any, tightest: bool, offsets: Any, work: Any) -> int:
    """Do the same as `place` with Python lists, which is faster without compilation."""
    lower, upper, size, align = rows
    placed: list[tuple[int, int, int, int]] = []
    height = 0
    for b in order:
        low, high, need, step = lower[b], upper[b], size[b], align[b]
        best, least, top = -1, -1, 0
        for start, end in [(s, e) for s, e, t, u in placed if t < high and u > low]:
            gap = start - top
            if gap >= need and (least < 0 or gap < least):
                best, least = top, gap
                if not tightest:
                    break
            if end > top:
                top = end if step == 1 else -(-end // step) * step
        offset = top if least < 0 else best
        offsets[b] = offset
        height = max(height, offset + need)
        insort(placed, (offset, offset + need, low, high))
    return height


def orders(problem: PackingProblem) -> Iterator[tuple[list[int], bool]]:
    """Yield placement orders, each with True if buffers go into the tightest gap. Largest first leads.

    Orders by crowd come next: they leave the fewest buffers too high in large problems.
    """
    size, lower, crowd, lifetime = problem.size, problem.lower, problem.crowd, problem.lifetime
    area = [s * t for s, t in zip(size, lifetime, strict=True)]
    keys: list[list[tuple[int, ...]]] = [
        [(-s,) for s in size],
        [(-c, -a) for c, a in zip(crowd, area, strict=True)],
        [(-c, -t) for c, t in zip(crowd, lifetime, strict=True)],
        [(-c, -s) for c, s in zip(crowd, size, strict=True)],
        [(-t,) for t in lifetime],
        [(low,) for low in lower],
        [(-s, low) for s, low in zip(size, lower, strict=True)],
        [(-a,) for a in area],
        [(-s, -t) for s, t in zip(size, lifetime, strict=True)],
    ]
    ordered = [sorted(range(problem.count), key=key.__getitem__) for key in keys]
    for tightest in (True, False):
        for order in ordered:
            yield order, tightest
