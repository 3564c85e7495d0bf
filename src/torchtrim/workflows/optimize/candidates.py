"""Other plans for a budget that are run beside the first one; the quickest by the clock is taken.

Predicted times rest on what single operators took, so of plans that are predicted alike another may be
quicker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from torchtrim.errors import InfeasibleBudget, PlannedStepFailed
from torchtrim.planner.planner import Planner
from torchtrim.planner.several import Planners
from torchtrim.records.budget import Budget
from torchtrim.records.plan import Plan
from torchtrim.records.trial import Trial

WORTH = 0.97
"""Of the first plan's time: measured times of two runs of one step differ by less, when nothing disturbs."""
_TIGHTER = (0.97, 0.93, 0.88)
_ALONE = ("recompute", "replay")


class Timed(NamedTuple):
    """A plan that was run within the budget."""

    plan: Plan
    trial: Trial


def others(
    planner_of: Callable[[str], Planner | Planners],
    apart: Sequence[Plan],
    budget: Budget,
    most: int,
) -> list[Plan]:
    """Up to `most` plans apart from these, those first that are predicted to be quickest.

    `planner_of` gives the planner of one technique alone, or of all for the empty name.
    """
    found: list[Plan] = []
    for plan in _planned(planner_of, budget):
        if all(plan.techniques != one.techniques for one in (*apart, *found)):
            found.append(plan)
    return sorted(found, key=lambda plan: plan.predicted.step_seconds)[:most]


def _planned(planner_of: Callable[[str], Planner | Planners], budget: Budget) -> Iterator[Plan]:
    """For tighter budgets too: more that is made again may take less time."""
    tries = [("", int(share * budget.bytes)) for share in _TIGHTER]
    for name, most in (*tries, *((alone, budget.bytes) for alone in _ALONE)):
        try:
            yield planner_of(name).plan(budget._replace(bytes=most))
        except InfeasibleBudget:
            continue


def quickest(
    first: Timed, plans: Iterable[Plan], run: Callable[[Plan], Trial | None]
) -> tuple[Timed, str]:
    """The quickest of the first and the others that `run` within the budget, and a note on them."""
    best, seconds = first, [first.trial.seconds]
    for plan in plans:
        trial = _survives(plan, run)
        if trial is None:
            continue
        seconds.append(trial.seconds)
        if trial.seconds < WORTH * first.trial.seconds and trial.seconds < best.trial.seconds:
            best = Timed(plan, trial)
    if len(seconds) == 1:
        return best, "no other plan for the budget was found to run beside the first"
    taken = f"number {seconds.index(best.trial.seconds) + 1} is taken"
    times = ", ".join(f"{1e3 * one:.1f}" for one in seconds)
    return best, f"{len(seconds)} plans were run, at {times} ms a step: {taken}"


def _survives(plan: Plan, run: Callable[[Plan], Trial | None]) -> Trial | None:
    try:
        return run(plan)
    except PlannedStepFailed:
        return None
