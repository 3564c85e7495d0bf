"""The plan of a batch that was found: the learning rates that go with it."""

from __future__ import annotations

from torchtrim.planner.plans import made_plan
from torchtrim.records.estimate import Growth
from torchtrim.records.plan import Plan, Prediction, Technique
from torchtrim.records.profile import Profile


def rates_plan(
    profile: Profile, techniques: tuple[Technique, ...], growth: Growth, budget: int
) -> Plan | None:
    """A plan of these techniques alone; None where there are none. The script's batch is changed by hand, so
    that the plan names neither its text nor its shapes."""
    if not techniques:
        return None
    return made_plan(
        profile,
        fingerprint={},
        techniques=techniques,
        predicted=Prediction(peak_bytes=growth.peak_bytes or 0, step_seconds=0.0),
        budget_bytes=budget,
    )
