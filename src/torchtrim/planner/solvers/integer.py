"""The quickest choice within a budget, and what no choice is below: the problem as an integer program.

`pip install torchtrim[solver]` brings what solves it. It begins with the best choice that the local search
knows.
"""

from __future__ import annotations

import importlib.util
import math
from functools import cached_property
from typing import TYPE_CHECKING

from torchtrim.planner.linear import Linear, linear
from torchtrim.planner.problem import Chosen, Problem
from torchtrim.planner.solvers.base import Answer

if TYPE_CHECKING:
    from torchtrim.planner.solvers.moments import Heights, MomentSearch

_LOWEST = 5.0
"""Seconds for which the lowest is looked for."""
_MOST_TERMS = 400_000  # Arbitrary; larger programs are not solved in the seconds that there are.
_NEAR = 2.5e-3
"""By how much of the step a choice may be slower than the quickest, where that takes long to find."""
_NEAR_UNITS = 4.0
"""Likewise for the lowest, of which the peak has 4,096."""


class Integer:
    """The integer program of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    @staticmethod
    def installed() -> bool:
        """Whether there is a solver."""
        return importlib.util.find_spec("highspy") is not None

    @cached_property
    def _linear(self) -> Linear:
        return linear(self._problem)

    @cached_property
    def _heights(self) -> Heights:
        from torchtrim.planner.solvers.moments import Heights

        return Heights(self._linear)

    @cached_property
    def fits(self) -> bool:
        """Whether the program is small enough to be solved while a person waits."""
        return sum(len(row.terms) for row in self._linear.rows) <= _MOST_TERMS

    def quickest(self, budget: int, start: Chosen | None = None, limit: float = math.inf) -> Answer:
        """The choice within a budget that adds least time, looked for during `limit` seconds; infinity
        bounds a budget that none is within."""
        seconds = self._problem.seconds
        longest = max(map(abs, seconds), default=0.0) or 1.0
        near = _NEAR * self._problem.step.seconds / longest
        costs = tuple(one / longest for one in seconds)
        found = self._search(costs, budget, near, limit).run(start)
        bound = self._problem.forced_seconds + max(found.bound, 0.0) * longest
        return Answer(found.chosen, bound, found.proven)

    def lowest(self, start: Chosen | None = None) -> Answer:
        """The choice with the smallest peak."""
        return self._search((), None, _NEAR_UNITS, _LOWEST).run(start)

    def _search(
        self, costs: tuple[float, ...], limit: int | None, near: float, seconds: float
    ) -> MomentSearch:
        from torchtrim.planner.solvers.moments import MomentSearch

        def fits(chosen: Chosen) -> bool:
            return limit is None or self._problem.run(chosen).peak_bytes <= limit

        return MomentSearch(self._linear, self._heights, costs, limit, near, seconds, fits)
