"""A plan that was run, and what it was measured to need."""

from __future__ import annotations

from typing import NamedTuple

from torchtrim.errors import Unsupported
from torchtrim.records.budget import MemoryKind
from torchtrim.records.plan import Plan
from torchtrim.records.trial import Trial


class Tried(NamedTuple):
    """A plan that was run, and what it used of the memory that the budget is on; None for the original."""

    plan: Plan | None
    trial: Trial | None
    used: int

    @classmethod
    def unchanged(cls, used: int) -> Tried:
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
