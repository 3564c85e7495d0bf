"""What a solver is."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torchtrim.planner.front import Front
from torchtrim.planner.problem import Chosen, Problem


class Solved(NamedTuple):
    """The best choices found. `optimal`: there are no better ones."""

    front: Front
    optimal: bool


class Answer(NamedTuple):
    """A choice within the budget, None if none was found, and whether none is better.

    `bound`: what any choice within the budget adds at least, in seconds; of the lowest, its bytes.
    """

    chosen: Chosen | None
    bound: float
    proven: bool


class Solver(Protocol):
    """A way to choose options. The same problem always gets the same front."""

    def solve(self, problem: Problem) -> Solved | None:
        """The best choices for every budget; None where the problem is not for this solver."""
        ...
