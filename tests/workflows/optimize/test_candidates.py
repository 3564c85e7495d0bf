"""Of several plans for a budget that are run, the quickest is taken."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torchtrim
from steps import encoder, train_step
from torchtrim.errors import PlannedStepFailed
from torchtrim.records.budget import Budget, memory_limit
from torchtrim.records.terms import Terms
from torchtrim.records.trial import Request
from torchtrim.workflows.optimize.fitting import Fitting
from torchtrim.workflows.optimize.trials import TimedPlan, others, quickest


def step_of() -> torchtrim.TrainStep:
    torch.manual_seed(0)
    return train_step(encoder(32, 4), torch.randn(16, 48, 32), "SGD")


def plan(name: str, seconds: float) -> Any:
    return SimpleNamespace(techniques=(name,), predicted=SimpleNamespace(step_seconds=seconds))


def timed(name: str, seconds: float) -> TimedPlan:
    return TimedPlan(plan(name, seconds), SimpleNamespace(seconds=seconds))  # type: ignore[arg-type]


def ran(times: dict[str, float | None]) -> Callable[[Any], Any]:
    """Runs plans, which take so long; None for one that is over the budget."""

    def run(one: Any) -> Any:
        (name,) = one.techniques
        if name == "fails":
            raise PlannedStepFailed("no")
        seconds = times[name]
        return None if seconds is None else SimpleNamespace(seconds=seconds)

    return run


@pytest.mark.parametrize(
    ("times", "taken"),
    [
        ({"b": 0.9, "c": 0.8}, "c"),
        ({"b": 0.98, "c": 0.99}, "a"),
        ({"b": None, "c": 0.9}, "c"),
        ({"b": None, "c": None}, "a"),
    ],
)
def test_the_quickest_is_taken_where_it_is_clearly_quicker(
    times: dict[str, float | None], taken: str
) -> None:
    plans = [plan(name, 1.0) for name in (*times, "fails")]
    times = {**times, "fails": 0.1}
    best, note = quickest(timed("a", 1.0), plans, ran(times))
    assert best.plan.techniques == (taken,)
    runs = 1 + sum(one is not None for name, one in times.items() if name != "fails")
    assert note.startswith(f"{runs} plans were run" if runs > 1 else "no other plan")


@pytest.mark.slow
def test_other_plans_keep_to_the_budget_and_differ() -> None:
    fitting = Fitting(step_of(), Request(steps=2), lambda _: None)
    original = fitting.observe()
    bias = original.peak_bytes - fitting.planner(original).simulated_original
    budget = Budget(int(0.7 * original.peak_bytes), bias=bias)
    first = fitting.planner(original).plan(budget)
    found = others(lambda only: fitting.planner(original, only), [first], budget, 4)
    assert found
    assert len({repr(one.techniques) for one in (first, *found)}) == len(found) + 1
    assert all(one.predicted.peak_bytes <= budget.bytes for one in found)
    predicted = [one.predicted.step_seconds for one in found]
    assert predicted == sorted(predicted)
    assert others(lambda only: fitting.planner(original, only), [first], budget, 0) == []
    rest = others(lambda only: fitting.planner(original, only), [first, found[0]], budget, 4)
    assert [one.techniques for one in rest] == [one.techniques for one in found[1:]]


@pytest.mark.slow
def test_a_fit_says_which_was_taken_and_is_certified() -> None:
    fit = Fitting(step_of(), Request(steps=2), lambda _: None, Terms(candidates=3)).fit(
        memory_limit("70%")
    )
    assert any("plans were run, at" in note for note in fit.notes)
    assert fit.certificate is not None
    assert fit.certificate.verdict == "BITWISE"
    assert fit.planned is not None
    assert fit.planned.peak_bytes <= fit.budget.bytes
