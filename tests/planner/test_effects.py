"""Predicted effects of techniques: they add up to the plan's prediction."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from profiles import training_step
from torchtrim.planner.planner import Planner
from torchtrim.planner.plans import adding_up
from torchtrim.records.budget import Budget
from torchtrim.records.plan import Plan, PredictedEffect, Prediction, Technique


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


def test_effects_add_up_to_a_corrected_prediction_too() -> None:
    saved = {"overwrite": 100, "replay": 700}
    effects = tuple(
        PredictedEffect(technique=name, saved_bytes=size, added_seconds=0.1)
        for name, size in saved.items()
    )
    plan = Plan(
        torchtrim="0",
        script="s.py",
        fingerprint={},
        budget_bytes=300,
        techniques=tuple(Technique(name=name, where=("Net",)) for name in saved),
        predicted=Prediction(peak_bytes=260, step_seconds=1.0, effects=effects),
    )
    settled = adding_up(plan, 1000).predicted.effects
    assert [one.saved_bytes for one in settled] == [100, 640]
    assert adding_up(plan, 1060) is plan
    unknown = replace(plan, techniques=(*plan.techniques, plan.techniques[0]))
    assert adding_up(unknown, 1000) is unknown
