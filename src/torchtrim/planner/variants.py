"""Plans with SEMANTIC techniques: from the original step, and from a recording of each replacement."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from torchtrim.errors import InfeasibleBudget
from torchtrim.planner.planner import Planner
from torchtrim.records.budget import Budget
from torchtrim.records.plan import Plan, Technique

# A SEMANTIC plan is chosen if it takes at most this share of the time of a BITWISE or ROUNDING
# plan. Measured times of two runs of one step differ by less.
WORTH = 0.95


class Variant(NamedTuple):
    """A step as recorded with techniques. `offset`: its bias minus the original's, in bytes."""

    techniques: tuple[Technique, ...]
    planner: Planner
    offset: int = 0

    def budget(self, whole: Budget) -> Budget:
        """Return the budget of the original, with this step's bias."""
        return whole.biased(whole.bias + self.offset)


class Planners:
    """Plans over recorded variants of a step, and picks the fastest plan that fits.

    `first`: the planner of the original step. `forced`: a variant must be used even if the original fits.
    """

    def __init__(self, first: Planner, variants: Sequence[Variant], *, forced: bool) -> None:
        self._variants = tuple(variants) if forced else (Variant((), first), *variants)
        self.forced = forced or first.forced
        self.profile = first.profile
        self.pinned = first.pinned
        self.simulated_original = first.simulated_original
        self.unchanged = first.unchanged
        self.frontier = first.frontier

    def plan(self, budget: Budget) -> Plan:
        """Return the quickest plan that is predicted to stay within the budget: see `Planner.plan`."""
        plans: list[tuple[float, Plan]] = []
        for variant in self._variants:
            with contextlib.suppress(InfeasibleBudget):
                plan = variant.planner.plan(variant.budget(budget))
                plans.append((_price(variant, plan), _with(variant, plan)))
        if not plans:
            smallest = self.floor_plan(budget).predicted.peak_bytes
            raise self.infeasible(budget.bytes, smallest)
        return min(plans, key=lambda priced: priced[0])[1]

    def floor_plan(self, budget: Budget) -> Plan:
        """Return the plan with the smallest peak found."""
        return min(
            (_with(v, v.planner.floor_plan(v.budget(budget))) for v in self._variants),
            key=lambda plan: (plan.predicted.peak_bytes, len(plan.techniques)),
        )

    def infeasible(self, budget: int, smallest: int) -> InfeasibleBudget:
        """Return the error that states the smallest budget that fits and the source of the smallest peak."""
        lowest = min(self._variants, key=lambda v: v.planner.floor.outcome.peak_bytes + v.offset)
        return lowest.planner.infeasible(budget, smallest)


def _with(variant: Variant, plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, techniques=(*variant.techniques, *plan.techniques))


def _price(variant: Variant, plan: Plan) -> float:
    on_device, on_this_machine = variant.planner.priced
    seconds = on_device - on_this_machine + plan.predicted.step_seconds
    return seconds / WORTH if variant.techniques else seconds
