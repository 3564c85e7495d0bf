"""From greedy packings to lower ones: how buffers are placed, which capacities are tried, in which orders."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from torchtrim.memory.packing import greedy, search
from torchtrim.memory.packing.engine import LoopEngine, can_compile, compiled, plain
from torchtrim.memory.packing.problem import PackingProblem


class Effort:
    """Units of work left to a search, each about as long as another; `pace` is how many fit a second."""

    def __init__(self, units: float, pace: float, deadline: float | None = None) -> None:
        self._units = units
        self._pace = pace
        self._deadline = deadline

    @property
    def left(self) -> float:
        """Units left."""
        if self._deadline is None:
            return self._units
        return min(self._units, (self._deadline - time.monotonic()) * self._pace)

    def spend(self, units: float) -> None:
        """Count work that was done."""
        self._units -= units


_QUANTA = (0.01, 0.02, 0.05, 0.1, 0.2)
_NOISE = 0.1  # Arbitrary; one tenth reorders neighbours, and keeps the order as a whole.
_FAMILIES = 4  # The four orders that `ranks` lists.


def ranks(problem: PackingProblem, number: int) -> list[int]:
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


_GREEDY_SECONDS = 5.0  # Arbitrary; the first two orders are always tried.
_HOISTING_SECONDS, _ROUNDS = 25.0, 100


class Placing:
    """Places the buffers of a problem, and remembers where the greedy orders led."""

    def __init__(self, problem: PackingProblem, engine: LoopEngine) -> None:
        self._problem = problem
        self._engine = engine
        self._rows = tuple(map(engine.array, problem.rows))
        self._work = tuple(engine.empty(problem.count) for _ in range(4))
        self._each = problem.count**2 / (4 * engine.pace)
        self._starts: list[Start] = []

    def greedy(self) -> Iterator[list[int]]:
        """Offsets of the greedy orders: largest first, and others while they are quick."""
        for done, (order, tightest) in enumerate(greedy.orders(self._problem)):
            if done > 1 and done * self._each > _GREEDY_SECONDS:
                return
            offsets = self._place(order, tightest)
            self._starts.append((self._problem.height(offsets), order, tightest))
            yield offsets

    def hoisted(self, goal: int, deadline: float | None, *, endless: bool) -> Iterator[list[int]]:
        """Offsets of orders in which what ended above the goal comes earlier, each time anew.

        For a fixed effort and no longer than the deadline, or until then where it is endless.
        """
        rounds = min(_ROUNDS, int(_HOISTING_SECONDS / self._each))
        for done, offsets in enumerate(hoisted(self._problem, self._starts, self._place, goal)):
            yield offsets
            late = deadline is not None and time.monotonic() >= deadline
            if late or (done + 1 >= rounds and not endless):
                return

    def _place(self, order: Sequence[int], tightest: bool) -> list[int]:
        offsets = self._engine.empty(self._problem.count)
        self._engine.place(self._engine.array(order), self._rows, tightest, offsets, self._work)
        return list(map(int, offsets))


_FORWARD = (0.0, 0.3, 0.6)
_ORDERS = 3  # Arbitrary; it is not known beforehand which leads down, and each takes a turn.

Place = Callable[[Sequence[int], bool], list[int]]
Start = tuple[int, list[int], bool]


def hoisted(
    problem: PackingProblem, starts: Sequence[Start], place: Place, goal: int
) -> Iterator[list[int]]:
    """Offsets, round after round, without an end while a buffer ends above the goal.

    A buffer that ends above the goal came when the low gaps were taken. It goes some way to the front, at
    random how far, and all are placed again: squeaky wheel optimization (Joslin and Clements, JAIR 10,
    1999). Several orders take turns, since it is not known beforehand which of them leads down.

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
    problem: PackingProblem,
    order: Sequence[int],
    offsets: Sequence[int],
    goal: int,
    chance: random.Random,
) -> list[int]:
    """The order, with each buffer that ends above the goal at a part of its place."""
    keys = [0.0] * problem.count
    for at, b in enumerate(order):
        high = offsets[b] + problem.size[b] > goal
        keys[b] = at * chance.choice(_FORWARD) if high else float(at)
    return sorted(order, key=keys.__getitem__)


_MOMENT, _SHORT_EFFORT, _LONG_EFFORT = 4e6, 8e7, 7e9
_FEW_NODES, _NODES = 200, 1500
_FEWER, _EASY = 4, 32
_LONG, _LONGER = 128, 16
_PATIENCE = 4  # Arbitrary; failures in a row before the target comes nearer.
_LOADING_SECONDS = 5.0  # About what numba takes to be imported and to load what it compiled.
_FEW_PAIRS = 2_000_000  # Where plain loops take about as long as loading the compiled ones.


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Offsets of a problem's buffers and their height; `proven` where a search saw that none is lower."""

    offsets: list[int]
    height: int
    proven: bool = False


def improving(
    problem: PackingProblem, capacity: int | None, seconds: float | None
) -> Iterator[Placement]:
    """Layouts, each lower than the one before, as `pack` says; the last may only say that it is proven.

    With more seconds the same is tried, and then more.
    """
    best: Placement | None = None
    goal = max(problem.lower_bound, capacity or 0)
    for layout in _tried(problem, goal, seconds):
        if best is None or layout.height < best.height or layout.proven:
            best = layout
            yield best
        if best.height <= goal or best.proven:
            return


def _tried(problem: PackingProblem, goal: int, seconds: float | None) -> Iterator[Placement]:
    """Every layout that is tried, until the effort or the time is spent."""
    deadline = None if seconds is None else time.monotonic() + seconds
    best: Placement | None = None
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


def _searchable(problem: PackingProblem, units: float) -> bool:
    return problem.count * problem.spans <= min(units, _LONG_EFFORT)


def _placed(
    problem: PackingProblem, goal: int, deadline: float | None, *, alone: bool
) -> Iterator[list[int]]:
    """Offsets from placing in several orders and, unless these are wanted alone, in better ones."""
    engine = compiled() if problem.count**2 > _FEW_PAIRS and can_compile() else plain()
    placing = Placing(problem, engine)
    yield from placing.greedy()
    if not alone:
        last = deadline is not None and not _searchable(problem, _LONG_EFFORT)
        yield from placing.hoisted(goal, deadline, endless=last)


def _stages(deadline: float | None) -> list[tuple[Callable[[], LoopEngine], float]]:
    """The engines to search with, and for how much effort at most.

    Compiled loops take seconds to load, so plain ones try a moment, or alone where there is little time.
    """
    worth = deadline is None or deadline - time.monotonic() > _LOADING_SECONDS
    if worth and can_compile():
        return [(plain, _MOMENT), (compiled, _LONG_EFFORT if deadline is None else math.inf)]
    return [(plain, _SHORT_EFFORT if deadline is None else math.inf)]


def _past(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def _layout(problem: PackingProblem, offsets: Iterable[int]) -> Placement:
    """The layout, or its mirror image where the highest buffer's padding makes that lower."""
    placed = list(offsets)
    top = max(o + s for o, s in zip(placed, problem.size, strict=True))
    mirrored = [top - o - s for o, s in zip(placed, problem.size, strict=True)]
    turns = any(problem.padding) and max(problem.align) == 1
    lower = min((placed, mirrored), key=problem.height) if turns else placed
    return Placement(offsets=lower, height=problem.height(lower))


class Descent:
    """Searches under one capacity after another, each time in another order of the buffers.

    Attempts at the floor, which would be optimal, take turns with ones a part of the way down to it.
    """

    def __init__(
        self, problem: PackingProblem, engine: LoopEngine, effort: Effort, goal: int
    ) -> None:
        self._problem = problem
        self._engine = engine
        self._effort = effort
        self._goal = goal
        self._work = engine.room(problem.count, len(problem.load))
        self._floor = problem.floor
        self._share = 0.5
        self._failed = 0
        self._numbers = {True: count(), False: count()}

    def run(self, best: Placement) -> Iterator[Placement]:
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

    def _attempt(self, capacity: int, number: int) -> Placement | None:
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


def rows_of(problem: PackingProblem, order: list[int]) -> tuple[list[int], ...]:
    """The problem's columns in this order, and for each buffer the equal one before it."""
    columns = [[values[i] for i in order] for values in problem.rows]
    seen: dict[tuple[int, ...], int] = {}
    twins = []
    for index, kind in enumerate(zip(*columns, strict=True)):
        twins.append(seen.get(kind, -1))
        seen[kind] = index
    return (*columns, twins)
