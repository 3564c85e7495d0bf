"""Plans that are run for a budget: what they were measured to need, and which others to try.

Predicted times rest on what single operators took, so of plans that are predicted alike another may be
quicker than the first. Before a budget is refused, plans without techniques that saved less than predicted
are tried, and each technique alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from torchtrim.errors import InfeasibleBudget, PlannedStepFailed, Unsupported
from torchtrim.planner.planner import Planner
from torchtrim.planner.several import Planners
from torchtrim.records.allowance import Allowance
from torchtrim.records.budget import Budget, MemoryKind
from torchtrim.records.plan import Plan
from torchtrim.records.trial import Trial

WORTH = 0.97
"""Of the first plan's time: measured times of two runs of one step differ by less, when nothing disturbs."""
_TIGHTER = (0.97, 0.93, 0.88)
_ALONE = ("recompute", "replay")
_WELL_USED = 0.9
_HELD = 0.01
"""A plan that is measured within so much of its prediction says nothing against its techniques."""


class MeasuredPlan(NamedTuple):
    """A plan that was run, and what it used of the memory that the budget is on; None for the original."""

    plan: Plan | None
    trial: Trial | None
    used: int

    @classmethod
    def unchanged(cls, used: int) -> MeasuredPlan:
        """The original, which changes nothing."""
        return cls(None, None, used)


def key_of(plan: Plan, kind: MemoryKind) -> tuple[str, MemoryKind]:
    """What tells a plan that was run from others."""
    return repr(plan.techniques), kind


def measured(trial: Trial, kind: MemoryKind) -> int:
    """The trial's figure of that kind of memory. Raises `Unsupported` where it was not measured."""
    figure = {
        "allocated": trial.peak_bytes,
        "reserved": max((step.reserved_bytes or 0 for step in trial.steps), default=0),
        "rss": trial.rss_bytes or 0,
    }[kind]
    if not figure:
        raise Unsupported(
            f"--memory-kind {kind}: it is not measured on {trial.device}. "
            "`allocated` is measured everywhere, `reserved` on CUDA, `rss` on CPU."
        )
    return figure


class TimedPlan(NamedTuple):
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
    first: TimedPlan, plans: Iterable[Plan], run: Callable[[Plan], Trial | None]
) -> tuple[TimedPlan, str]:
    """The quickest of the first and the others that `run` within the budget, and a note on them."""
    best, seconds = first, [first.trial.seconds]
    for plan in plans:
        trial = _survives(plan, run)
        if trial is None:
            continue
        seconds.append(trial.seconds)
        if trial.seconds < WORTH * first.trial.seconds and trial.seconds < best.trial.seconds:
            best = TimedPlan(plan, trial)
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


class PlanOutcome(NamedTuple):
    """A plan that was run: what it used, and what the simulation alone had predicted."""

    plan: Plan
    used: int
    simulated: int

    @property
    def held(self) -> bool:
        """Whether it needed no more than was predicted."""
        return self.used <= (1 + _HELD) * self.simulated


def suspects(outcomes: Iterable[PlanOutcome]) -> list[frozenset[str]]:
    """The techniques to plan without: each one of plans that needed more than predicted, then all of them.

    A technique of a plan that held is none.
    """
    held, missed = set[str](), set[str]()
    for one in outcomes:
        (held if one.held else missed).update(unit.name for unit in one.plan.techniques)
    blamed = sorted(missed - held)
    alone = [frozenset((name,)) for name in blamed]
    return [*alone, frozenset(blamed)] if len(blamed) > 1 else alone


def note_on(blamed: Iterable[frozenset[str]]) -> str:
    """What a person is told of them."""
    named = sorted(frozenset().union(*blamed))
    return f"{' and '.join(named)} saved less than predicted, so plans without were tried too"


def plans_below(
    planners: Iterable[Planner | Planners], budget: Budget, allowed: Allowance
) -> Iterator[Plan]:
    """Each planner's plan for the budget, or that with its smallest peak; none that is not allowed.

    Those that fit come first, then those with the smallest peaks.
    """
    plans = [_plan_of(planner, budget) for planner in planners]
    plans = [
        one
        for one in plans
        if one.techniques
        and all(allowed.holds(unit.equivalence, unit.name) for unit in one.techniques)
    ]
    yield from sorted(plans, key=lambda one: max(one.predicted.peak_bytes, budget.bytes))


def _plan_of(planner: Planner | Planners, budget: Budget) -> Plan:
    try:
        return planner.plan(budget)
    except InfeasibleBudget:
        return planner.floor_plan(budget)


def well_used(used: int, error: int, budget: int) -> bool:
    """Whether a plan that used so much, by an error beside its prediction, leaves little of the budget."""
    return used <= budget and (used >= _WELL_USED * budget or error > -0.02 * budget)
