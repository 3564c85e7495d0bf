"""An integer program: the quickest choice within a budget, and a bound that no choice can beat.

`pip install torchtrim[solver]` installs its solver, which starts from the best choice of the local search.
"""

from __future__ import annotations

import importlib.util
import math
from functools import cached_property
from typing import TYPE_CHECKING

from torchtrim.planner.front import Answer
from torchtrim.planner.linear import Linear, linear
from torchtrim.planner.problem import Chosen, Problem

if TYPE_CHECKING:
    from torchtrim.planner.solvers.moments import MomentMemory, MomentSearch

_LOWEST = 5.0  # Arbitrary; seconds to search for the lowest peak.
_MOST_TERMS = 400_000  # Arbitrary; larger programs are not solved within the seconds of a search.
# Arbitrary; how much slower than the bound, as a share of the step, a choice may be if the search
# takes long.
_NEAR = 2.5e-3
_NEAR_UNITS = 4.0  # Arbitrary; the same for the lowest peak, in units of 1/4096 of the peak.


class Integer:
    """The integer program of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    @staticmethod
    def installed() -> bool:
        """Return True if the solver is installed."""
        return importlib.util.find_spec("highspy") is not None

    @cached_property
    def _linear(self) -> Linear:
        return linear(self._problem)

    @cached_property
    def _heights(self) -> MomentMemory:
        from torchtrim.planner.solvers.moments import MomentMemory

        return MomentMemory(self._linear)

    @cached_property
    def fits(self) -> bool:
        """True if the program is small enough to solve while a person waits."""
        return sum(len(row.terms) for row in self._linear.rows) <= _MOST_TERMS

    def quickest(self, budget: int, start: Chosen | None = None, limit: float = math.inf) -> Answer:
        """Return the quickest choice within a budget, after a search of at most `limit` seconds.

        The bound is infinite if no choice is within the budget.
        """
        seconds = self._problem.seconds
        longest = max(map(abs, seconds), default=0.0) or 1.0
        near = _NEAR * self._problem.step.seconds / longest
        costs = tuple(each / longest for each in seconds)
        answer = self._search(costs, budget, near, limit).run(start)
        bound = self._problem.forced_seconds + max(answer.bound, 0.0) * longest
        return answer._replace(bound=bound)

    def lowest(self, start: Chosen | None = None) -> Answer:
        """Return the choice with the smallest peak."""
        return self._search((), None, _NEAR_UNITS, _LOWEST).run(start)

    def _search(
        self, costs: tuple[float, ...], limit: int | None, near: float, seconds: float
    ) -> MomentSearch:
        from torchtrim.planner.solvers.moments import MomentSearch

        def fits(chosen: Chosen) -> bool:
            return limit is None or self._problem.run(chosen).peak_bytes <= limit

        return MomentSearch(self._linear, self._heights, costs, limit, near, seconds, fits)
