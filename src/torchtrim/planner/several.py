"""Plans that may make another function: of the step as it is, and as recorded with each replacement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from torchtrim.errors import InfeasibleBudget
from torchtrim.planner.pins import Pinned
from torchtrim.planner.planner import Planner
from torchtrim.records.budget import Budget
from torchtrim.records.plan import Plan, Technique
from torchtrim.records.profile import Profile
from torchtrim.records.report import FrontierPoint

WORTH = 0.95
"""A plan that makes another function is chosen where it takes at most so much of the time of one that does
not: measured times of two runs of one step differ by less."""


class Variant(NamedTuple):
    """A step as techniques make it. `offset`: by how much more its measured peak is over its simulated one
    than the original's is."""

    techniques: tuple[Technique, ...]
    planner: Planner
    offset: int = 0

    def budget(self, whole: Budget) -> Budget:
        """The budget of the original, with this step's bias."""
        return whole.biased(whole.bias + self.offset)


class Planners:
    """A planner of several steps, of which plans take the quickest that fits.

    `first`: that of the step as it is. `forced`: one of the variants has to be taken, though that might fit.
    """

    def __init__(self, first: Planner, variants: Sequence[Variant], *, forced: bool) -> None:
        self._first = first
        self._variants = tuple(variants) if forced else (Variant((), first), *variants)
        self._forced = forced

    @property
    def pinned(self) -> Pinned:
        """The pins of the step as it is."""
        return self._first.pinned

    @property
    def profile(self) -> Profile:
        """The profile of the step as it is."""
        return self._first.profile

    @property
    def forced(self) -> bool:
        """Whether a plan has to change something, though the original fits."""
        return self._forced or self._first.forced

    @property
    def simulated_original(self) -> int:
        """The simulated peak of the step as it is, in bytes."""
        return self._first.simulated_original

    def unchanged(self, budget: Budget) -> Plan:
        """The plan that changes nothing."""
        return self._first.unchanged(budget)

    def plan(self, budget: Budget) -> Plan:
        """The quickest plan that is expected to stay within the budget: see `Planner.plan`."""
        found = list(self._fitting(budget))
        if not found:
            smallest = self.floor_plan(budget).predicted.peak_bytes
            raise self.infeasible(budget.bytes, smallest)
        return min(found)[-1]

    def _fitting(self, budget: Budget) -> Iterator[tuple[float, int, Plan]]:
        """Each variant's plan, with what it is chosen by: its price, then the order of variants."""
        for number, one in enumerate(self._variants):
            try:
                made = one.planner.plan(one.budget(budget))
            except InfeasibleBudget:
                continue
            yield _price(one, made), number, _with(one, made)

    def floor_plan(self, budget: Budget) -> Plan:
        """The plan with the smallest peak that was found."""
        return min(
            (_with(one, one.planner.floor_plan(one.budget(budget))) for one in self._variants),
            key=lambda plan: (plan.predicted.peak_bytes, len(plan.techniques)),
        )

    def infeasible(self, budget: int, smallest: int) -> InfeasibleBudget:
        """The error that says what would fit and what sets the smallest peak."""
        lowest = min(
            self._variants, key=lambda one: one.planner.floor.outcome.peak_bytes + one.offset
        )
        return lowest.planner.infeasible(budget, smallest)

    def frontier(self, points: int = 8, *, bias: int = 0) -> tuple[FrontierPoint, ...]:
        """The frontier of the step as it is."""
        return self._first.frontier(points, bias=bias)


def _with(variant: Variant, plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, techniques=(*variant.techniques, *plan.techniques))


def _price(variant: Variant, plan: Plan) -> float:
    """What a step takes on the device that it is for."""
    there, here = variant.planner.priced
    seconds = there - here + plan.predicted.step_seconds
    return seconds / WORTH if variant.techniques else seconds
