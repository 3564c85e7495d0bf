"""Plans of recorded steps: monotone, sure of themselves as far as they say, and only what is allowed."""

from __future__ import annotations

import math

import pytest
import torch
from tests.cases import zoo
from torch import nn

from steps import STEPS, train_step, trial
from torchtrim import TrainStep
from torchtrim.errors import InfeasibleBudget
from torchtrim.executor.registry import names
from torchtrim.planner.planner import Planner
from torchtrim.records.budget import Budget
from torchtrim.records.profile import Profile

MODELS = [name for name in zoo.OWN if name.startswith("own ")]
"""Those that need no other library."""


def profile_of(name: str) -> Profile:
    torch.manual_seed(0)
    if name in STEPS:
        return trial(STEPS[name]())[1]
    sample = zoo.OWN[name]()
    optimizer = torch.optim.SGD(sample.model.parameters(), 1e-3)
    return trial(TrainStep(sample.model.train(), sample.loss, optimizer, sample.batch))[1]


def planner_of(profile: Profile, **options: object) -> Planner:
    return Planner(profile, step_seconds=profile.step_seconds, fingerprint={}, **options)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "flat",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in [*STEPS, *MODELS]
            if name != "flat"
        ),
    ],
)
def test_a_looser_budget_never_gets_a_slower_plan(name: str) -> None:
    planner = planner_of(profile_of(name))
    low, high = planner.floor.outcome.peak_bytes, planner.simulated_original
    assert low <= high
    before = math.inf
    for step in range(21):
        budget = low + (high - low) * step // 20
        plan = planner.plan(Budget(budget))
        assert plan.predicted.peak_bytes <= budget
        assert plan.predicted.step_seconds <= before
        assert plan.bound_seconds is not None
        assert plan.bound_seconds <= plan.predicted.step_seconds
        assert plan.gap is not None
        assert 0 <= plan.gap < 1
        before = plan.predicted.step_seconds
    assert plan.techniques == ()


@pytest.mark.slow
def test_below_the_floor_it_says_what_would_fit() -> None:
    planner = planner_of(profile_of("blocks"))
    floor = planner.floor.outcome.peak_bytes
    with pytest.raises(InfeasibleBudget) as caught:
        planner.plan(Budget(floor - 1))
    assert caught.value.smallest_bytes == floor
    assert planner.plan(Budget(floor)).predicted.peak_bytes == floor


class Wide(nn.Module):
    """For a while it has sixteen times what it is given, and keeps none of that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.repeat(1, 16).add(1).sum()
        return (x * scale).tanh().exp().sin()


@pytest.mark.parametrize("again", [True, False])
def test_what_sets_the_floor_is_named_by_the_technique_that_does_it(again: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), Wide()) for _ in range(3)))
    recorded = trial(train_step(net, torch.randn(64, 32), "SGD"))[1]
    left = [name for name in names() if name != "recompute" or not again]
    planner = planner_of(recorded, exclude=left)
    floor = planner.floor
    assert bool(floor.options) is again
    set_by = planner.infeasible(0, floor.outcome.peak_bytes).set_by
    run_again = [f"recompute of {one.where} in the backward" for one in floor.options]
    assert set_by.startswith(tuple(run_again) if again else "addition in the forward"), set_by


class Taught(nn.Module):
    """A small model beside a wide teacher that does not train."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own = nn.Linear(8, 1)
        self.teacher = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            says = self.teacher(x)
        return self.own(x) - says


@pytest.mark.parametrize("width", [512, 1])
def test_a_floor_without_gradients_is_lowered_by_parts_of_the_batch(width: int) -> None:
    planner = planner_of(trial(train_step(Taught(width), torch.randn(512, 8), "SGD"))[1])
    said = str(planner.infeasible(0, planner.floor.outcome.peak_bytes))
    assert ("call `Taught.teacher` on parts of the batch" in said) is (width > 1), said


class Codebook(nn.Module):
    """Its distances live until forward returns, or end with their last use."""

    def __init__(self, ends: bool) -> None:
        super().__init__()
        self.ends, self.codes = ends, nn.Parameter(torch.randn(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            distances = torch.cdist(x, self.codes)
            chosen = distances.argmin(1)
            if self.ends:
                del distances
            counts = torch.nn.functional.one_hot(chosen, 64).float().sum(0)
        return (x - self.codes[chosen]) / (1 + counts.sum())


@pytest.mark.parametrize("ends", [True, False])
def test_a_local_variable_that_sets_the_floor_is_named(ends: bool) -> None:
    torch.manual_seed(0)
    planner = planner_of(trial(train_step(Codebook(ends), torch.randn(512, 8), "SGD"))[1])
    said = str(planner.infeasible(0, planner.floor.outcome.peak_bytes))
    assert (
        "which a variable keeps past its last use until `Codebook.forward` returns" in said
    ) is not ends, said


@pytest.mark.usefixtures("without_replay")
def test_what_is_excluded_is_not_in_a_plan() -> None:
    profile = profile_of("blocks")
    planner = planner_of(profile)
    (recompute,) = (t for t in planner.floor_plan(Budget(0)).techniques if t.name == "recompute")
    without = planner_of(profile, exclude=recompute.where[:1]).floor_plan(Budget(0))
    places = [where for one in without.techniques for where in one.where]
    assert recompute.where[0] not in places
    every = "recompute", "overwrite", "optimizer_in_backward", "split_channels"
    assert planner_of(profile, exclude=every).floor_plan(Budget(0)).techniques == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["blocks", "own encoder"])
def test_what_may_round_as_well_makes_no_floor_higher(name: str) -> None:
    profile = profile_of(name)
    exact, rounding = (planner_of(profile, allow=allow) for allow in ("BITWISE", "ROUNDING"))
    assert rounding.floor.outcome.peak_bytes <= exact.floor.outcome.peak_bytes
