"""What to try before a budget is refused: plans without techniques that saved less than predicted, and each
technique alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torchtrim.errors import InfeasibleBudget
from torchtrim.planner.planner import Planner
from torchtrim.planner.several import Planners
from torchtrim.records.allowance import Allowance
from torchtrim.records.budget import Budget
from torchtrim.records.plan import Plan

_HELD = 0.01
"""A plan that is measured within so much of its prediction says nothing against its techniques."""


class Outcome(NamedTuple):
    """A plan that was run: what it used, and what the simulation alone had predicted."""

    plan: Plan
    used: int
    simulated: int

    @property
    def held(self) -> bool:
        """Whether it needed no more than was predicted."""
        return self.used <= (1 + _HELD) * self.simulated


def suspects(outcomes: Iterable[Outcome]) -> list[frozenset[str]]:
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
