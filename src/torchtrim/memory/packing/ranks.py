"""Orders in which the search prefers buffers: long-lived ones first, and chance so that attempts differ."""

from __future__ import annotations

import math
import random

from torchtrim.memory.packing.problem import Problem

_QUANTA = (0.01, 0.02, 0.05, 0.1, 0.2)
_NOISE = 0.1
_FAMILIES = 4


def ranks(problem: Problem, number: int) -> list[int]:
    """The indices of all buffers, the preferred ones first; the same for the same number.

    By lifetime; by how crowded it gets, then by area; by crowd and lifetime in sections with some of the
    size; by crowd and lifetime.
    """
    chance = random.Random(number)
    family = number % _FAMILIES
    quantum = chance.choice(_QUANTA) if family else 2.0
    by_size = (0.0, 1.0, chance.random(), 0.0)[family]
    noise = _NOISE if number >= _FAMILIES else 0.0
    length = problem.lifetime
    if family == 2:
        length = [high - low for low, high in zip(problem.lower, problem.upper, strict=True)]
    keys = [
        (
            -round(crowd / problem.floor / quantum),
            -long * size**by_size * math.exp(chance.gauss(0, noise)),
        )
        for crowd, long, size in zip(problem.crowd, length, problem.size, strict=True)
    ]
    return sorted(range(problem.count), key=keys.__getitem__)
