"""Predicted effects of techniques: they add up to the plan's prediction."""

from __future__ import annotations

import pytest

from profiles import training_step
from torchtrim.planner.planner import Planner
from torchtrim.records.budget import Budget


@pytest.mark.parametrize("share", [0.9, 0.7, 0.6])
def test_effects_add_up_to_the_prediction(share: float) -> None:
    profile = training_step()
    planner = Planner(profile, step_seconds=profile.step_seconds, fingerprint={})
    original = planner.simulated_original
    floor = planner.floor.outcome.peak_bytes
    plan = planner.plan(Budget(max(int(share * original), floor)))
    effects = plan.predicted.effects
    assert [one.technique for one in effects] == [one.name for one in plan.techniques]
    assert original - sum(one.saved_bytes for one in effects) == plan.predicted.peak_bytes
    added = sum(one.added_seconds for one in effects)
    assert profile.step_seconds + added == pytest.approx(plan.predicted.step_seconds)


def test_an_unchanged_step_has_no_effects() -> None:
    profile = training_step()
    planner = Planner(profile, step_seconds=profile.step_seconds, fingerprint={})
    assert planner.unchanged(Budget(planner.simulated_original)).predicted.effects == ()
