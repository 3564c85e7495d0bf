"""The order of a frontier's points."""

from __future__ import annotations

from profiles import training_step
from torchtrim.executor.registry import Option
from torchtrim.planner.other_budgets import in_order, point_of
from torchtrim.records.report import FrontierPoint


def point(budget: int, peak: int, *places: str, by_hand: str = "") -> FrontierPoint:
    options = [Option("recompute", place) for place in places]
    return point_of(
        training_step(),
        options,
        budget_bytes=budget,
        peak_bytes=peak,
        seconds=1.0,
        by_hand=by_hand,
    )


def test_the_largest_budget_comes_first_and_a_plan_once_at_its_smallest() -> None:
    halves = point(125, 125, by_hand="two halves")
    loose, tight, last = point(139, 128, "a"), point(129, 128, "a"), point(110, 110, "a", "b")
    assert in_order([loose, tight, last, halves]) == (tight, halves, last)
    assert in_order([last, last]) == (last,)


def test_a_point_counts_the_places_of_each_technique() -> None:
    assert point(9, 9, "a", "b").techniques == {"recompute": 2}
    assert point(9, 9).device == ""
