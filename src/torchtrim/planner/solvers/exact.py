"""Every choice there is, where there are few."""

from __future__ import annotations

from torchtrim.planner.front import Front, Point
from torchtrim.planner.problem import Chosen, Problem
from torchtrim.planner.solvers.base import Solved

_MOST = 2048  # Sets of eleven options that exclude none: a moment. More is for the other solvers.


class Exact:
    """Tries every set of options that do not exclude each other."""

    def solve(self, problem: Problem) -> Solved | None:
        """All of them; None where there are more than two thousand."""
        sets = _all(problem)
        if sets is None:
            return None
        front = Front()
        for chosen in sets:
            outcome = problem.run(chosen)
            front.add(Point(outcome.peak_bytes, outcome.added_seconds, chosen))
        return Solved(front, optimal=True)


def _all(problem: Problem) -> list[Chosen] | None:
    found: list[Chosen] = [()]
    for number in range(len(problem.options)):
        clashes = problem.clashes[number]
        found += [(*chosen, number) for chosen in found if clashes.isdisjoint(chosen)]
        if len(found) > _MOST:
            return None
    return found
