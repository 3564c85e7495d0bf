"""Instances to pack: small ones of every kind by number, and squares that were cut into buffers."""

from __future__ import annotations

import math
import random

from torchtrim.memory.packing import Buffer

Boxes = list[tuple[int, int, int]]
Placed = list[tuple[Buffer, int]]


def of(boxes: Boxes) -> list[Buffer]:
    return [Buffer(place, *box) for place, box in enumerate(boxes)]


def any_instance(number: int, most: int = 12) -> list[Buffer]:
    """A random instance: empty lifetimes, no bytes and equal buffers among them."""
    chance = random.Random(number)
    span, sizes = chance.choice((2, 5, 20)), chance.choice((1, 3, 10, 10**9))
    boxes: Boxes = []
    for _ in range(chance.randrange(most + 1)):
        if boxes and chance.random() < 0.2:
            boxes.append(chance.choice(boxes))
        lower = chance.randrange(-span, span)
        boxes.append((lower, lower + chance.randrange(span), chance.randrange(sizes + 1)))
    return of(boxes[:most])


def cut(number: int, cuts: int, side: int = 1024) -> list[Buffer]:
    """A square of time and memory, cut across again and again: it can be packed without a gap."""
    chance = random.Random(number)
    pieces = [(0, side, 0, side)]
    for _ in range(cuts):
        at = max(
            range(len(pieces)),
            key=lambda i: (
                (pieces[i][1] - pieces[i][0]) * (pieces[i][3] - pieces[i][2]) * chance.random()
            ),
        )
        left, right, low, high = pieces.pop(at)
        if (right - left >= 2 and chance.random() < 0.5) or high - low < 2:
            middle = chance.randrange(left + 1, max(right, left + 2))
            pieces += [(left, middle, low, high), (middle, right, low, high)]
        else:
            middle = chance.randrange(low + 1, high)
            pieces += [(left, right, low, middle), (left, right, middle, high)]
    boxes = [(left, right, high - low) for left, right, low, high in pieces if left < right]
    chance.shuffle(boxes)
    return of(boxes)


def crowded(number: int, moments: int = 7, level: int = 6) -> list[Buffer]:
    """As many bytes alive at each moment as at any other; some have no packing without a gap."""
    chance = random.Random(number)
    room = [level] * moments
    boxes: Boxes = []
    while any(room):
        lower = chance.choice([t for t in range(moments) if room[t]])
        size = chance.randint(1, min(room[lower], 3))
        upper = lower + 1
        while upper < moments and room[upper] >= size and chance.random() < 0.6:
            upper += 1
        room[lower:upper] = [left - size for left in room[lower:upper]]
        boxes.append((lower, upper, size))
    return of(boxes)


def lowest_height(buffers: list[Buffer], alignment: int = 1) -> int:
    """The least height, from every order in which buffers can be put upon each other from the bottom up."""
    real = [b for b in buffers if b.size and b.lower < b.upper]
    above = sum(b.size + math.lcm(b.alignment, alignment) for b in real)
    return _lowest(real, [], above, alignment)


def can_be_below(height: int, buffers: list[Buffer]) -> bool:
    """Whether any order leads below this height."""
    return _lowest(buffers, [], height, 1) < height


def _lowest(left: list[Buffer], placed: Placed, best: int, alignment: int) -> int:
    if not left:
        return min(best, max((o + b.size for b, o in placed), default=0))
    for i, b in enumerate(left):
        under = [o + c.size for c, o in placed if c.lower < b.upper and b.lower < c.upper]
        step = math.lcm(b.alignment, alignment)
        offset = -(-max(under, default=0) // step) * step
        alive = sum(c.size for c in left if c.lower <= b.lower < c.upper)
        if offset + alive < best and (not placed or offset >= placed[-1][1]):
            best = _lowest(left[:i] + left[i + 1 :], [*placed, (b, offset)], best, alignment)
    return best


def largest_first(buffers: list[Buffer]) -> int:
    """The height where the largest goes first, each into its tightest gap: written for comparison."""
    placed: list[tuple[int, Buffer]] = []
    for b in sorted(buffers, key=lambda b: -b.size):
        if not b.size or b.lower == b.upper:
            continue
        near = sorted((o, c.size) for o, c in placed if c.lower < b.upper and b.lower < c.upper)
        top, gaps = 0, []
        for offset, size in near:
            if offset - top >= b.size:
                gaps.append((offset - top, top))
            top = max(top, offset + size)
        placed.append((min(gaps)[1] if gaps else top, b))
    return max((o + b.size for o, b in placed), default=0)


def most_alive(buffers: list[Buffer]) -> int:
    """The most bytes alive at one moment, told moment by moment."""
    return max(
        (sum(c.size for c in buffers if c.lower <= b.lower < c.upper) for b in buffers), default=0
    )
