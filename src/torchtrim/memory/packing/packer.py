"""Offsets for buffers with lifetimes, with the lowest height found."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count

from torchtrim.memory.packing import greedy, search
from torchtrim.memory.packing.buffers import Buffer, Packing, PackingProblem, check, problem_of
from torchtrim.memory.packing.engine import LoopEngine, can_compile, compiled, plain

_QUANTA = (0.01, 0.02, 0.05, 0.1, 0.2)
_NOISE = 0.1  # Arbitrary; one tenth reorders neighbours, and keeps the order as a whole.
_FAMILIES = 4  # The four orders that `ranks` lists.


def ranks(problem: PackingProblem, number: int) -> list[int]:
    """Return buffer indices in order of preference, always the same for a number.

    The families in turn: lifetime; crowd, then area; crowd, then sections weighted by size; crowd, lifetime.
    """
    chance = random.Random(number)
    family = number % _FAMILIES
    quantum = chance.choice(_QUANTA) if family else 2.0
    by_size = (0.0, 1.0, chance.random(), 0.0)[family]
    noise = _NOISE if number >= _FAMILIES else 0.0
    length = problem.lifetime
    if family == 2:
        length = [high - low for low, high in zip(problem.lower, problem.upper, strict=True)]
    keys = []
    for crowd, long, size in zip(problem.crowd, length, problem.size, strict=True):
        weight = long * size**by_size * math.exp(chance.gauss(0, noise))
        keys.append((-round(crowd / problem.floor / quantum), -weight))
    return sorted(range(problem.count), key=keys.__getitem__)


_GREEDY_SECONDS = 5.0  # Arbitrary; the first two orders are always tried.
_HOISTING_SECONDS, _ROUNDS = 25.0, 100  # Arbitrary; whichever is reached first.
_FORWARD = (0.0, 0.3, 0.6)  # Arbitrary; shares of its place in the order that a buffer keeps.
_ORDERS = 3  # Arbitrary; it is not known beforehand which leads down, and each takes a turn.


class Placing:
    """Placement of a problem's buffers by greedy orders, which become starting points."""

    def __init__(self, problem: PackingProblem, engine: LoopEngine) -> None:
        self._problem = problem
        self._engine = engine
        self._rows = tuple(map(engine.array, problem.rows))
        self._work = tuple(engine.empty(problem.count) for _ in range(4))
        self._each = problem.count**2 / (4 * engine.pace)
        self._starts: list[tuple[int, list[int], bool]] = []  # heights of placed orders

    def greedy(self) -> Iterator[list[int]]:
        """Yield offsets of the greedy orders, largest first; the later orders only while they are quick."""
        for done, (order, tightest) in enumerate(greedy.orders(self._problem)):
            if done > 1 and done * self._each > _GREEDY_SECONDS:
                return
            offsets = self._place(order, tightest)
            self._starts.append((self._problem.height(offsets), order, tightest))
            yield offsets

    def hoisted(self, goal: int, deadline: float, *, endless: bool) -> Iterator[list[int]]:
        """Yield offsets, round after round, until the deadline or, unless `endless`, a fixed effort.

        A buffer that ends above the goal was placed after the low gaps were full. It moves forward by a
        random distance, and all buffers are placed again: squeaky wheel optimization (Joslin and Clements,
        JAIR 10, 1999). Several orders take turns.
        """
        chance, size = random.Random(0), self._problem.size
        lowest = sorted(self._starts, key=lambda start: start[0])[:_ORDERS]
        turns = [(order, tightest, self._place(order, tightest)) for _, order, tightest in lowest]
        rounds = min(_ROUNDS, int(_HOISTING_SECONDS / self._each))
        for done in count():
            order, tightest, offsets = turns[done % len(turns)]
            keys = {
                b: at * chance.choice(_FORWARD) if offsets[b] + size[b] > goal else float(at)
                for at, b in enumerate(order)
            }
            order = sorted(order, key=keys.__getitem__)
            offsets = self._place(order, tightest)
            turns[done % len(turns)] = order, tightest, offsets
            yield offsets
            if time.monotonic() >= deadline or (done + 1 >= rounds and not endless):
                return

    def _place(self, order: Sequence[int], tightest: bool) -> list[int]:
        offsets = self._engine.empty(self._problem.count)
        self._engine.place(self._engine.array(order), self._rows, tightest, offsets, self._work)
        return list(map(int, offsets))


_MOMENT, _SHORT_EFFORT = 4e6, 8e7  # Units: 0.4 s and 8 s of plain loops.
_LONG_EFFORT = 7e9  # Units: 18 s of compiled loops.
_FEW_NODES, _NODES = 200, 1500  # Arbitrary; another order is worth more than a long attempt.
_FEWER, _EASY = 4, 32  # Arbitrary; every 4th of 32 attempts is at the floor, then every 2nd.
_LONG, _LONGER = 128, 16  # Arbitrary; every 128th attempt gets 16 times as many nodes.
_PATIENCE = 4  # Arbitrary; failures in a row before the target comes nearer.
_LOADING_SECONDS = 5.0  # About what numba takes to be imported and to load what it compiled.
_FEW_PAIRS = 2_000_000  # Where plain loops take about as long as loading the compiled ones.


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Offsets of a problem's buffers and their height. `proven`: an exhaustive search found no lower one."""

    offsets: list[int]
    height: int
    proven: bool = False


def improving(
    problem: PackingProblem, capacity: int | None, seconds: float | None
) -> Iterator[Placement]:
    """Yield placements, each lower than the last or proven. A larger `seconds` extends the same search."""
    best: Placement | None = None
    goal = max(problem.lower_bound, capacity or 0)
    for layout in _tried(problem, goal, seconds):
        if best is None or layout.height < best.height or layout.proven:
            best = layout
            yield best
        if best.height <= goal or best.proven:
            return


def _tried(problem: PackingProblem, goal: int, seconds: float | None) -> Iterator[Placement]:
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    is_large = problem.count**2 > _FEW_PAIRS
    placing = Placing(problem, compiled() if is_large and can_compile() else plain())
    placed = placing.greedy()
    if seconds != 0:
        endless = deadline < math.inf and not _searchable(problem, _LONG_EFFORT)
        placed = chain(placed, placing.hoisted(goal, deadline, endless=endless))
    best: Placement | None = None
    for offsets in placed:
        layout = _layout(problem, offsets)
        best = layout if best is None or layout.height < best.height else best
        yield layout
    assert best is not None
    for engine, units in _stages(deadline):
        if time.monotonic() >= deadline:
            return
        if _searchable(problem, units):
            for lower in Descent(problem, engine(), units, deadline, goal).run(best):
                best = lower
                yield lower


def _searchable(problem: PackingProblem, units: float) -> bool:
    return problem.count * problem.spans <= min(units, _LONG_EFFORT)


def _stages(deadline: float) -> list[tuple[Callable[[], LoopEngine], float]]:
    """Return the engines to search with, and the most effort for each: compiled loops load for seconds."""
    endless = deadline == math.inf
    if can_compile() and deadline - time.monotonic() > _LOADING_SECONDS:
        return [(plain, _MOMENT), (compiled, _LONG_EFFORT if endless else math.inf)]
    return [(plain, _SHORT_EFFORT if endless else math.inf)]


def _layout(problem: PackingProblem, offsets: Iterable[int]) -> Placement:
    """Return the placement, or its mirror image if the highest buffer's padding makes that lower."""
    placed = list(offsets)
    top = max(o + s for o, s in zip(placed, problem.size, strict=True))
    mirrored = [top - o - s for o, s in zip(placed, problem.size, strict=True)]
    turns = any(problem.padding) and max(problem.align) == 1
    lower = min((placed, mirrored), key=problem.height) if turns else placed
    return Placement(offsets=lower, height=problem.height(lower))


class Descent:
    """Searches under a descending capacity, each with another order of the buffers.

    Attempts at the floor, which would be optimal, alternate with attempts part of the way down to it.
    """

    def __init__(
        self,
        problem: PackingProblem,
        engine: LoopEngine,
        units: float,
        deadline: float,
        goal: int,
    ) -> None:
        self._problem = problem
        self._engine = engine
        self._units = units
        self._deadline = deadline
        self._goal = goal
        self._work = engine.room(problem.count, len(problem.load))
        self._floor = problem.floor
        self._share = 0.5
        self._failed = 0
        self._numbers = {True: count(), False: count()}

    def run(self, best: Placement) -> Iterator[Placement]:
        """Yield placements, each lower than the last, until the effort is spent."""
        for turn in count():
            if best.height <= self._floor:
                yield replace(best, proven=not any(self._problem.padding))
                return
            if self._units_left <= 0:
                return
            at_floor = turn % (_FEWER if turn < _EASY else 2) == 0
            capacity = self._floor if at_floor else self._target(best.height)
            placement = self._attempt(capacity, next(self._numbers[at_floor]))
            if not at_floor:
                self._adapt(placement is not None)
            if placement is not None and placement.height < best.height:
                best = placement
                yield best

    @property
    def _units_left(self) -> float:
        return min(self._units, (self._deadline - time.monotonic()) * self._engine.pace)

    def _attempt(self, capacity: int, number: int) -> Placement | None:
        order = ranks(self._problem, number)
        rows = tuple(map(self._engine.array, rows_of(self._problem, order)))
        limits = self._nodes(number), int(min(max(self._units_left, 1), _LONG_EFFORT))
        result = self._engine.search(rows, len(self._problem.load), capacity, limits, self._work)
        self._units -= int(self._work[8][search.SPENT])
        if result == search.EXHAUSTED:
            self._floor = capacity + self._problem.step
        if result != search.FOUND:
            return None
        offsets = [0] * self._problem.count
        for index, buffer in enumerate(order):
            offsets[buffer] = int(self._work[0][index])
        return _layout(self._problem, offsets)

    def _nodes(self, number: int) -> int:
        """Return the node limit of an attempt: usually small, occasionally large."""
        few = max(_FEW_NODES, self._problem.count * (3 + number // _PATIENCE) // 2)
        enough = max(_NODES, 4 * self._problem.count)
        return enough * _LONGER if number % _LONG == _LONG - 1 else min(few, enough)

    def _adapt(self, found: bool) -> None:
        self._failed = 0 if found else self._failed + 1
        if found:
            self._share = min(0.5, 2 * self._share)
        elif self._failed % _PATIENCE == 0:
            self._share /= 2

    def _target(self, height: int) -> int:
        step = self._problem.step
        aim = height - max(step, int((height - self._floor) * self._share))
        if self._goal > self._problem.lower_bound:
            aim = self._goal
        return max(self._floor, aim // step * step)


def rows_of(problem: PackingProblem, order: list[int]) -> tuple[list[int], ...]:
    """Return the reordered columns, and for each buffer the index of the equal one before it."""
    columns = [[values[i] for i in order] for values in problem.rows]
    seen: dict[tuple[int, ...], int] = {}
    twins = []
    for index, kind in enumerate(zip(*columns, strict=True)):
        twins.append(seen.get(kind, -1))
        seen[kind] = index
    return (*columns, twins)


def pack(
    buffers: Sequence[Buffer],
    capacity: int | None = None,
    *,
    alignment: int = 1,
    seconds: float | None = None,
    better: Callable[[Packing], None] | None = None,
) -> Packing:
    """Give each buffer an offset so that buffers live at the same time do not overlap, with a low height.

    buffers: ids must be unique; lifetimes are half-open. A buffer without bytes or lifetime gets offset 0.
    capacity: bytes available. The search stops when the height is within it, which is not guaranteed.
    alignment: offsets are multiples of it, in bytes, and of the buffer's own alignment.
    seconds: time to search after several greedy orders; 0 for the greedy orders alone. None searches with a
    fixed effort (seconds to a minute if the bound is not met) and is deterministic.
    better: called with each packing lower than all before it, so an interrupted search keeps its best.

    The result is never higher than greedy placement by size. The loops are compiled if numba is installed.
    Memory grows with the number of buffers, not of their pairs. Raises `UsageError` for invalid arguments.
    """
    check(buffers, capacity, alignment, seconds)
    taking = [buffer for buffer in buffers if buffer.takes_room]
    problem = problem_of(taking, alignment)
    best = Placement(offsets=[], height=0, proven=True)
    for best in improving(problem, capacity, seconds) if taking else ():
        if better is not None:
            better(_packing(buffers, taking, problem, best))
    return _packing(buffers, taking, problem, best)


def _packing(
    buffers: Sequence[Buffer], taking: Sequence[Buffer], problem: PackingProblem, layout: Placement
) -> Packing:
    offsets: dict[str | int, int] = dict.fromkeys((buffer.id for buffer in buffers), 0)
    offsets.update(zip((buffer.id for buffer in taking), layout.offsets, strict=True))
    return Packing(
        offsets=offsets,
        height=layout.height,
        lower_bound=problem.lower_bound,
        optimal=layout.proven or layout.height <= problem.lower_bound,
    )
