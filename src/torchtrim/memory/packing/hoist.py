"""Placing again with the buffers that ended too high moved forward in the order.

A buffer that ends above the goal came when the low gaps were taken. It goes some way to the front, at
random how far, and all are placed again: squeaky wheel optimization (Joslin and Clements, JAIR 10, 1999).
Several orders take turns, since it is not known beforehand which of them leads down.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from torchtrim.memory.packing.problem import Problem

_FORWARD = (0.0, 0.3, 0.6)
_ORDERS = 3

Place = Callable[[Sequence[int], bool], list[int]]
Start = tuple[int, list[int], bool]


def hoisted(
    problem: Problem, starts: Sequence[Start], place: Place, goal: int
) -> Iterator[list[int]]:
    """Offsets, round after round, without an end while a buffer ends above the goal.

    starts: heights, with the orders and the choice of the tightest gap that led to them.
    place: offsets for an order, and whether each goes into its tightest gap.
    """
    chance = random.Random(0)
    turns = [(order, tightest) for _, order, tightest in sorted(starts, key=_height)[:_ORDERS]]
    placed = [place(*turn) for turn in turns]
    while True:
        for number, (order, tightest) in enumerate(turns):
            order = _forward(problem, order, placed[number], goal, chance)
            turns[number] = order, tightest
            placed[number] = place(order, tightest)
            yield placed[number]


def _height(start: Start) -> int:
    return start[0]


def _forward(
    problem: Problem, order: Sequence[int], offsets: Sequence[int], goal: int, chance: random.Random
) -> list[int]:
    """The order, with each buffer that ends above the goal at a part of its place."""
    keys = [0.0] * problem.count
    for at, b in enumerate(order):
        high = offsets[b] + problem.size[b] > goal
        keys[b] = at * chance.choice(_FORWARD) if high else float(at)
    return sorted(order, key=keys.__getitem__)
