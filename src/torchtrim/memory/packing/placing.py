"""A problem's buffers placed one after another: in several greedy orders, then in better ones."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from torchtrim.memory.packing import greedy
from torchtrim.memory.packing.engine import Engine
from torchtrim.memory.packing.hoist import Start, hoisted
from torchtrim.memory.packing.problem import Problem

_GREEDY_SECONDS = 5.0
_HOISTING_SECONDS, _ROUNDS = 25.0, 100


class Placing:
    """Places the buffers of a problem, and remembers where the greedy orders led."""

    def __init__(self, problem: Problem, engine: Engine) -> None:
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
