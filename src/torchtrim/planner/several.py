"""Plans that may make another function: of the step as it is, and as recorded with each replacement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from torchtrim.errors import InfeasibleBudget
from torchtrim.planner.pins import Pinned
from torchtrim.planner.planner import Planner
from torchtrim.records.plan import MemoryKind, Plan, Technique
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

    def unchanged(
        self, budget: int, *, bias: int = 0, memory_kind: MemoryKind = "allocated"
    ) -> Plan:
        """The plan that changes nothing."""
        return self._first.unchanged(budget, bias=bias, memory_kind=memory_kind)

    def plan(self, budget: int, *, bias: int = 0, memory_kind: MemoryKind = "allocated") -> Plan:
        """The quickest plan that is expected to stay within the budget: see `Planner.plan`."""
        found = list(self._fitting(budget, bias, memory_kind))
        if not found:
            smallest = self.floor_plan(budget, bias=bias, memory_kind=memory_kind)
            raise self.infeasible(budget, smallest.predicted.peak_bytes)
        return min(found)[-1]

    def _fitting(
        self, budget: int, bias: int, memory_kind: MemoryKind
    ) -> Iterator[tuple[float, int, Plan]]:
        """Each variant's plan, with what it is chosen by: its price, then the order of variants."""
        for number, one in enumerate(self._variants):
            try:
                made = one.planner.plan(budget, bias=bias + one.offset, memory_kind=memory_kind)
            except InfeasibleBudget:
                continue
            yield _price(one, made), number, _with(one, made)

    def floor_plan(
        self, budget: int, *, bias: int = 0, memory_kind: MemoryKind = "allocated"
    ) -> Plan:
        """The plan with the smallest peak that was found."""
        return min(
            (
                _with(
                    one,
                    one.planner.floor_plan(budget, bias=bias + one.offset, memory_kind=memory_kind),
                )
                for one in self._variants
            ),
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
