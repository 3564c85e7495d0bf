"""The best choices found: none of them is both higher and slower than another."""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import NamedTuple

from torchtrim.planner.problem import Chosen


class Point(NamedTuple):
    """A choice: its peak in bytes, the seconds it adds, and its options."""

    peak_bytes: int
    seconds: float
    chosen: Chosen


class Front:
    """Choices by rising peak and falling time, so that a looser budget never gets a slower one."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def add(self, point: Point) -> bool:
        """Keep a choice unless another is as low and as quick; whether it was kept."""
        place = bisect_right(self.points, (point.peak_bytes, float("inf")))
        if place and self.points[place - 1].seconds <= point.seconds:
            return False
        self.points = [
            one
            for one in self.points
            if one.peak_bytes < point.peak_bytes or one.seconds < point.seconds
        ]
        insort(self.points, point)
        return True

    def within(self, budget: int) -> Point | None:
        """The quickest choice whose peak is within the budget; None where none is."""
        place = bisect_right(self.points, (budget, float("inf")))
        return self.points[place - 1] if place else None

    @property
    def lowest(self) -> Point:
        """The choice with the smallest peak."""
        return self.points[0]
