"""No technique alone and no simple plan of a person's beats a plan, in bytes or in time."""

from __future__ import annotations

import pytest
from bench.by_hand import Trained
from bench.simple_plans import MODELS, SHARES, redundant, simple_plans

from steps import fitting


@pytest.mark.slow
def test_no_simple_plan_is_lower_or_quicker_and_no_option_superfluous() -> None:
    tried = fitting(Trained.of(MODELS["nerf"]).work, 1)
    original = tried.observe()
    planner = tried.planner(original)
    simple = list(simple_plans(tried, original, planner))
    assert "replay alone" in {one.name for one in simple}
    assert all(planner.floor.outcome.peak_bytes <= one.peak for one in simple)
    found = []
    for share in SHARES:
        budget = planner.simulated_original * share // 100
        if (choice := planner._within(budget)) is not None:
            found.append(choice)
            fitting_too = [one.seconds for one in simple if one.peak <= budget]
            assert choice.outcome.added_seconds <= min(fitting_too, default=float("inf")) + 1e-7
            assert redundant(planner, choice, budget) == []
    assert found
