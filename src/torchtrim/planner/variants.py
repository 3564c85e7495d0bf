"""Plans with SEMANTIC techniques: from the original step, and from a recording of each replacement."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from torchtrim.errors import InfeasibleBudget
from torchtrim.planner.pins import Pins
from torchtrim.planner.planner import Planner
from torchtrim.records.budget import Budget
from torchtrim.records.plan import Plan, Technique
from torchtrim.records.profile import Profile
from torchtrim.records.report import FrontierPoint

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
        self._first = first
        self._variants = tuple(variants) if forced else (Variant((), first), *variants)
        self._forced = forced

    @property
    def pinned(self) -> Pins:
        """The pins of the original step."""
        return self._first.pinned

    @property
    def profile(self) -> Profile:
        """The profile of the original step."""
        return self._first.profile

    @property
    def forced(self) -> bool:
        """True if a plan must change something even if the original fits."""
        return self._forced or self._first.forced

    @property
    def simulated_original(self) -> int:
        """The simulated peak of the original step, in bytes."""
        return self._first.simulated_original

    def unchanged(self, budget: Budget) -> Plan:
        """Return the plan that changes nothing."""
        return self._first.unchanged(budget)

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

    def frontier(self, points: int = 8, *, bias: int = 0) -> tuple[FrontierPoint, ...]:
        """Return the frontier of the original step."""
        return self._first.frontier(points, bias=bias)


def _with(variant: Variant, plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, techniques=(*variant.techniques, *plan.techniques))


def _price(variant: Variant, plan: Plan) -> float:
    on_device, on_this_machine = variant.planner.priced
    seconds = on_device - on_this_machine + plan.predicted.step_seconds
    return seconds / WORTH if variant.techniques else seconds
