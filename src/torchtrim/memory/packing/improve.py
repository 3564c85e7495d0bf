"""From greedy packings to lower ones: which capacities are tried, in which orders, for how long."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count

from torchtrim.memory.packing import greedy, search
from torchtrim.memory.packing.effort import Effort
from torchtrim.memory.packing.engine import Engine, can_compile, compiled, plain
from torchtrim.memory.packing.problem import Problem
from torchtrim.memory.packing.ranks import ranks

_MOMENT, _SHORT_EFFORT, _LONG_EFFORT = 4e6, 8e7, 7e9
_FEW_NODES, _NODES = 200, 1500
_FEWER, _EASY = 4, 32
_LONG, _LONGER = 128, 16
_PATIENCE = 4
_LOADING_SECONDS = 5.0
_FEW_PAIRS = 2_000_000
_GREEDY_SECONDS = 5.0, 25.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Offsets of a problem's buffers and their height; `proven` where a search saw that none is lower."""

    offsets: list[int]
    height: int
    proven: bool = False


def improve(problem: Problem, capacity: int | None, seconds: float | None) -> Layout:
    """The lowest layout found, as `pack` says."""
    deadline = None if seconds is None else time.monotonic() + seconds
    best = _greedy(problem, _GREEDY_SECONDS[seconds is None])
    for engine, units in _stages(deadline):
        if best.height <= problem.floor or best.proven or _past(deadline):
            break
        if problem.count * problem.spans > min(units, _LONG_EFFORT):
            continue
        effort = Effort(units, engine().pace, deadline)
        best = Descent(problem, engine(), effort, capacity).run(best)
    return best


def _stages(deadline: float | None) -> list[tuple[Callable[[], Engine], float]]:
    """The engines to search with, and for how much effort at most.

    Compiled loops take seconds to load, so plain ones try a moment, or alone where there is little time.
    """
    worth = deadline is None or deadline - time.monotonic() > _LOADING_SECONDS
    if worth and can_compile():
        return [(plain, _MOMENT), (compiled, _LONG_EFFORT if deadline is None else math.inf)]
    return [(plain, _SHORT_EFFORT if deadline is None else math.inf)]


def _past(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def _layout(problem: Problem, offsets: Iterable[int]) -> Layout:
    """The layout, or its mirror image where the highest buffer's padding makes that lower."""
    placed = list(offsets)
    top = max(o + s for o, s in zip(placed, problem.size, strict=True))
    mirrored = [top - o - s for o, s in zip(placed, problem.size, strict=True)]
    lower = min((placed, mirrored), key=problem.height) if any(problem.padding) else placed
    return Layout(offsets=lower, height=problem.height(lower))


def _greedy(problem: Problem, seconds: float) -> Layout:
    """The lowest of the greedy packings: largest first, and others while they are quick."""
    pairs = problem.count**2
    engine = compiled() if pairs > _FEW_PAIRS and can_compile() else plain()
    rows = tuple(map(engine.array, (problem.lower, problem.upper, problem.size)))
    work = tuple(engine.empty(problem.count) for _ in range(4))
    best: Layout | None = None
    for done, (order, tightest) in enumerate(greedy.orders(problem)):
        if best is not None and best.height <= problem.lower_bound:
            break
        if done > 1 and done * pairs > seconds * 4 * engine.pace:
            break
        offsets = engine.empty(problem.count)
        engine.place(engine.array(order), rows, tightest, offsets, work)
        layout = _layout(problem, map(int, offsets))
        if best is None or layout.height < best.height:
            best = layout
    assert best is not None
    return best


class Descent:
    """Searches under one capacity after another, each time in another order of the buffers.

    Attempts at the floor, which would be optimal, take turns with ones a part of the way down to it.
    """

    def __init__(
        self, problem: Problem, engine: Engine, effort: Effort, capacity: int | None
    ) -> None:
        self._problem = problem
        self._engine = engine
        self._effort = effort
        self._capacity = capacity
        self._work = engine.room(problem.count, len(problem.load))
        self._floor = problem.floor
        self._share = 0.5
        self._failed = 0
        self._numbers = {True: count(), False: count()}

    def run(self, best: Layout) -> Layout:
        """The lowest layout that the effort was enough for."""
        for turn in count():
            if best.height <= self._floor:
                return replace(best, proven=not any(self._problem.padding))
            if self._effort.left <= 0:
                return best
            at_floor = turn % (_FEWER if turn < _EASY else 2) == 0
            found = self._attempt(
                self._floor if at_floor else self._target(best.height),
                next(self._numbers[at_floor]),
            )
            if not at_floor:
                self._adapt(found is not None)
            best = found or best
        raise AssertionError

    def _attempt(self, capacity: int, number: int) -> Layout | None:
        order = ranks(self._problem, number)
        rows = tuple(map(self._engine.array, rows_of(self._problem, order)))
        limits = self._nodes(number), int(min(max(self._effort.left, 1), _LONG_EFFORT))
        found = self._engine.search(rows, len(self._problem.load), capacity, limits, self._work)
        self._effort.spend(int(self._work[8][search.SPENT]))
        if found == search.EXHAUSTED:
            self._floor = capacity + self._problem.step
        if found != search.FOUND:
            return None
        offsets = [0] * self._problem.count
        for index, buffer in enumerate(order):
            offsets[buffer] = int(self._work[0][index])
        return _layout(self._problem, offsets)

    def _nodes(self, number: int) -> int:
        """How many nodes are worth visiting: few at first, many from time to time."""
        few = max(_FEW_NODES, self._problem.count * (3 + number // _PATIENCE) // 2)
        enough = max(_NODES, 4 * self._problem.count)
        return enough * _LONGER if number % _LONG == _LONG - 1 else min(few, enough)

    def _adapt(self, found: bool) -> None:
        """Go down farther after a success, less far after failing a while."""
        self._failed = 0 if found else self._failed + 1
        if found:
            self._share = min(0.5, 2 * self._share)
        elif self._failed % _PATIENCE == 0:
            self._share /= 2

    def _target(self, height: int) -> int:
        """A multiple of the step between the floor and below this height."""
        step = self._problem.step
        aim = height - max(step, int((height - self._floor) * self._share))
        if self._capacity is not None and self._floor <= self._capacity < height:
            aim = self._capacity
        return max(self._floor, aim // step * step)


def rows_of(problem: Problem, order: list[int]) -> tuple[list[int], ...]:
    """The problem's columns in this order, and for each buffer the equal one before it."""
    columns = [
        [values[i] for i in order] for values in (problem.lower, problem.upper, problem.size)
    ]
    seen: dict[tuple[int, ...], int] = {}
    twins = []
    for index, kind in enumerate(zip(*columns, strict=True)):
        twins.append(seen.get(kind, -1))
        seen[kind] = index
    return (*columns, twins)
