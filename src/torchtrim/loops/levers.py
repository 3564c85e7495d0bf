"""What each technique would reach of a step's peak, alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torchtrim.planner.planner import Planner
from torchtrim.records.finding import EQUIVALENCES, Equivalence
from torchtrim.records.lever import Lever
from torchtrim.records.plan import MemoryKind, Plan, Technique
from torchtrim.techniques.base import names

# A plan or a lever that saves less of the peak is none.
LEAST_SAVING = 0.005
_RANK = EQUIVALENCES.index


class Reached:
    """What the plan that needs least was measured to need; `used` is its figure of that kind of memory."""

    def __init__(self, techniques: Sequence[Technique], used: int, seconds: float) -> None:
        self.names = tuple(one.name for one in techniques)
        self.lever = Lever(
            technique=" + ".join(self.names),
            equivalence=_least([one.equivalence for one in techniques]),
            peak_bytes=used,
            step_seconds=seconds,
            source="measured",
        )


def levers_of(
    planner_of: Callable[[str], Planner],
    whole: int,
    kind: MemoryKind,
    reached: Reached,
    exclude: Collection[str],
    allow: Equivalence,
) -> tuple[Lever, ...]:
    """The smallest peak of each technique that lowers it, and of those of the plan together: quickest first.

    `planner_of` plans with one technique alone; `whole` is the original's figure.
    """
    found = [reached.lever] if reached.names else []
    for name in names():
        if name in exclude or reached.names == (name,):
            continue
        planner = planner_of(name)
        bias = whole - planner.simulated_original
        plan = planner.floor_plan(0, bias=bias, memory_kind=kind)
        if plan.techniques and plan.predicted.peak_bytes < (1 - LEAST_SAVING) * whole:
            found.append(_simulated(name, plan, allow))
    return tuple(sorted(found, key=lambda lever: lever.step_seconds))


def _simulated(name: str, plan: Plan, allow: Equivalence) -> Lever:
    equivalence = _least([one.equivalence for one in plan.techniques])
    return Lever(
        technique=name,
        equivalence=equivalence,
        needs="" if _RANK(equivalence) <= _RANK(allow) else f"--allow {equivalence.lower()}",
        peak_bytes=plan.predicted.peak_bytes,
        step_seconds=plan.predicted.step_seconds,
        source="simulated",
    )


def _least(equivalences: Sequence[Equivalence]) -> Equivalence:
    """The least equal of several."""
    return max(equivalences, key=_RANK, default="BITWISE")
