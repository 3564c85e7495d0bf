"""From greedy packings to lower ones: which capacities are tried, in which orders, for how long."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count

from torchtrim.memory.packing import search
from torchtrim.memory.packing.effort import Effort
from torchtrim.memory.packing.engine import Engine, can_compile, compiled, plain
from torchtrim.memory.packing.placing import Placing
from torchtrim.memory.packing.problem import Problem
from torchtrim.memory.packing.ranks import ranks

_MOMENT, _SHORT_EFFORT, _LONG_EFFORT = 4e6, 8e7, 7e9
_FEW_NODES, _NODES = 200, 1500
_FEWER, _EASY = 4, 32
_LONG, _LONGER = 128, 16
_PATIENCE = 4
_LOADING_SECONDS = 5.0
_FEW_PAIRS = 2_000_000


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Offsets of a problem's buffers and their height; `proven` where a search saw that none is lower."""

    offsets: list[int]
    height: int
    proven: bool = False


def improving(problem: Problem, capacity: int | None, seconds: float | None) -> Iterator[Layout]:
    """Layouts, each lower than the one before, as `pack` says; the last may only say that it is proven.

    With more seconds the same is tried, and then more.
    """
    best: Layout | None = None
    goal = max(problem.lower_bound, capacity or 0)
    for layout in _tried(problem, goal, seconds):
        if best is None or layout.height < best.height or layout.proven:
            best = layout
            yield best
        if best.height <= goal or best.proven:
            return


def _tried(problem: Problem, goal: int, seconds: float | None) -> Iterator[Layout]:
    """Every layout that is tried, until the effort or the time is spent."""
    deadline = None if seconds is None else time.monotonic() + seconds
    best: Layout | None = None
    for offsets in _placed(problem, goal, deadline, alone=seconds == 0):
        layout = _layout(problem, offsets)
        best = layout if best is None or layout.height < best.height else best
        yield layout
    assert best is not None
    for engine, units in _stages(deadline):
        if _past(deadline):
            return
        if _searchable(problem, units):
            effort = Effort(units, engine().pace, deadline)
            for lower in Descent(problem, engine(), effort, goal).run(best):
                best = lower
                yield lower


def _searchable(problem: Problem, units: float) -> bool:
    return problem.count * problem.spans <= min(units, _LONG_EFFORT)


def _placed(
    problem: Problem, goal: int, deadline: float | None, *, alone: bool
) -> Iterator[list[int]]:
    """Offsets from placing in several orders and, unless these are wanted alone, in better ones."""
    engine = compiled() if problem.count**2 > _FEW_PAIRS and can_compile() else plain()
    placing = Placing(problem, engine)
    yield from placing.greedy()
    if not alone:
        last = deadline is not None and not _searchable(problem, _LONG_EFFORT)
        yield from placing.hoisted(goal, deadline, endless=last)


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
    turns = any(problem.padding) and max(problem.align) == 1
    lower = min((placed, mirrored), key=problem.height) if turns else placed
    return Layout(offsets=lower, height=problem.height(lower))


class Descent:
    """Searches under one capacity after another, each time in another order of the buffers.

    Attempts at the floor, which would be optimal, take turns with ones a part of the way down to it.
    """

    def __init__(self, problem: Problem, engine: Engine, effort: Effort, goal: int) -> None:
        self._problem = problem
        self._engine = engine
        self._effort = effort
        self._goal = goal
        self._work = engine.room(problem.count, len(problem.load))
        self._floor = problem.floor
        self._share = 0.5
        self._failed = 0
        self._numbers = {True: count(), False: count()}

    def run(self, best: Layout) -> Iterator[Layout]:
        """Layouts, each lower than the one before, while the effort lasts."""
        for turn in count():
            if best.height <= self._floor:
                yield replace(best, proven=not any(self._problem.padding))
                return
            if self._effort.left <= 0:
                return
            at_floor = turn % (_FEWER if turn < _EASY else 2) == 0
            found = self._attempt(
                self._floor if at_floor else self._target(best.height),
                next(self._numbers[at_floor]),
            )
            if not at_floor:
                self._adapt(found is not None)
            if found is not None and found.height < best.height:
                best = found
                yield best

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
        if self._goal > self._problem.lower_bound:
            aim = self._goal
        return max(self._floor, aim // step * step)


def rows_of(problem: Problem, order: list[int]) -> tuple[list[int], ...]:
    """The problem's columns in this order, and for each buffer the equal one before it."""
    columns = [[values[i] for i in order] for values in problem.rows]
    seen: dict[tuple[int, ...], int] = {}
    twins = []
    for index, kind in enumerate(zip(*columns, strict=True)):
        twins.append(seen.get(kind, -1))
        seen[kind] = index
    return (*columns, twins)
