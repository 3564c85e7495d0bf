"""The best choices found, none both higher and slower than another, and the results of solvers."""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import NamedTuple

from torchtrim.planner.problem import Chosen


class Point(NamedTuple):
    """A choice: its peak in bytes, its added seconds, and its options."""

    peak_bytes: int
    seconds: float
    chosen: Chosen


class Front:
    """Choices by rising peak and falling time, so a looser budget never gets a slower choice."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def add(self, point: Point) -> bool:
        """Add a choice unless another is as low and as quick; return True if it was added."""
        place = bisect_right(self.points, (point.peak_bytes, float("inf")))
        if place and self.points[place - 1].seconds <= point.seconds:
            return False
        self.points = [
            other
            for other in self.points
            if other.peak_bytes < point.peak_bytes or other.seconds < point.seconds
        ]
        insort(self.points, point)
        return True

    def within(self, budget: int) -> Point | None:
        """Return the quickest choice whose peak is within the budget, or None."""
        place = bisect_right(self.points, (budget, float("inf")))
        return self.points[place - 1] if place else None

    @property
    def lowest(self) -> Point:
        """The choice with the smallest peak."""
        return self.points[0]


class Solution(NamedTuple):
    """The best choices found. `optimal`: no better ones exist."""

    front: Front
    optimal: bool


class Answer(NamedTuple):
    """A choice within the budget, or None without one. `proven`: no better choice exists.

    `bound`: a lower bound on the seconds that a choice within the budget adds; for the lowest choice, on its
    bytes.
    """

    chosen: Chosen | None
    bound: float
    proven: bool
