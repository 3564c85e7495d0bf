"""Buffers as the packer works on them: padded sizes, and lifetimes as ranges of sections of time.

A section is a moment at which a largest set of buffers is alive together: just before one ends, after one
began. Two buffers are alive together if and only if they share a section, and there are no more sections
than buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import gcd, lcm

from torchtrim.memory.packing.buffers import Buffer


@dataclass(frozen=True, kw_only=True)
class PackingProblem:
    """What is to be packed, one entry a buffer: `lower` and `upper` are sections, half-open.

    lifetime: the time that it is alive, in the caller's unit.
    size: its bytes, rounded up to what all offsets are multiples of.
    padding: how many of these are not its own.
    align: what its offset is a multiple of, where that is more than all are multiples of; else 1.
    load: the bytes alive in each section.
    crowd: the most bytes alive together with a buffer, its own included.
    """

    lower: list[int]
    upper: list[int]
    lifetime: list[int]
    size: list[int]
    padding: list[int]
    align: list[int]
    load: list[int]
    crowd: list[int]
    lower_bound: int

    @property
    def count(self) -> int:
        """How many buffers there are."""
        return len(self.size)

    @property
    def rows(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """What the loops ask of each buffer: lower, upper, size and align."""
        return self.lower, self.upper, self.size, self.align

    @property
    def floor(self) -> int:
        """The lowest that a packing of the rounded sizes can be."""
        return max(self.load, default=0)

    @property
    def step(self) -> int:
        """Heights differ by multiples of this."""
        return gcd(*self.size, *(align for align in self.align if align > 1)) or 1

    @property
    def spans(self) -> int:
        """Sections of all buffers together."""
        return sum(self.upper) - sum(self.lower)

    def height(self, offsets: Sequence[int]) -> int:
        """Where the highest buffer ends, without what rounds it up."""
        return max(
            (o + s - p for o, s, p in zip(offsets, self.size, self.padding, strict=True)),
            default=0,
        )


def problem_of(buffers: Sequence[Buffer], alignment: int) -> PackingProblem:
    """The problem that these buffers are; each takes room, at multiples of its alignment and of this one."""
    lower, upper, sections = _sections(buffers)
    own = [lcm(b.alignment, alignment) for b in buffers]
    shared = gcd(*own)
    size = [-(-b.size // shared) * shared for b in buffers]
    padding = [s - b.size for s, b in zip(size, buffers, strict=True)]
    load = _loads(lower, upper, size, sections)
    return PackingProblem(
        lower=lower,
        upper=upper,
        lifetime=[b.upper - b.lower for b in buffers],
        size=size,
        padding=padding,
        align=[1 if align == shared else align for align in own],
        load=load,
        crowd=_most_within(load, lower, upper),
        lower_bound=_bound(lower, upper, load, padding),
    )


def _sections(buffers: Sequence[Buffer]) -> tuple[list[int], list[int], int]:
    events = [(b.lower, 1, i) for i, b in enumerate(buffers)]
    events += [(b.upper, 0, i) for i, b in enumerate(buffers)]
    lower, upper = [0] * len(buffers), [0] * len(buffers)
    section, grown = 0, False
    for _, begins, i in sorted(events):
        if begins:
            lower[i], grown = section, True
            continue
        section += grown
        upper[i], grown = section, False
    return lower, upper, section


def _loads(lower: list[int], upper: list[int], size: list[int], sections: int) -> list[int]:
    change = [0] * (sections + 1)
    for low, high, bytes_ in zip(lower, upper, size, strict=True):
        change[low] += bytes_
        change[high] -= bytes_
    total, loads = 0, []
    for delta in change[:-1]:
        total += delta
        loads.append(total)
    return loads


def _bound(lower: list[int], upper: list[int], load: list[int], padding: list[int]) -> int:
    """The most bytes alive at once; the highest buffer of a section needs no padding."""
    if not any(padding):
        return max(load, default=0)
    starting: list[list[int]] = [[] for _ in load]
    for i, low in enumerate(lower):
        starting[low].append(i)
    alive: list[tuple[int, int]] = []
    bound = 0
    for section, total in enumerate(load):
        for i in starting[section]:
            heappush(alive, (-padding[i], upper[i]))
        while alive[0][1] <= section:
            heappop(alive)
        bound = max(bound, total + alive[0][0])
    return bound


def _most_within(values: list[int], lower: list[int], upper: list[int]) -> list[int]:
    """The largest value in each range, from the largest of every power of two of neighbours."""
    tables = [values]
    while 2 ** len(tables) <= len(values):
        last, half = tables[-1], 2 ** (len(tables) - 1)
        tables.append([max(a, b) for a, b in zip(last, last[half:], strict=False)])
    found = []
    for low, high in zip(lower, upper, strict=True):
        level = (high - low).bit_length() - 1
        found.append(max(tables[level][low], tables[level][high - 2**level]))
    return found
