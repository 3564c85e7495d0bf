"""What public threads tell of other planners, and of checkpoints, does not happen here."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import draws
import torchtrim
from planner.solvers.test_solvers import problem_of
from step.oracle import peak
from steps import ConvNet, encoder, fitting, images, squared, train_step
from torchtrim import TrainStep
from torchtrim.planner.solvers.search import search
from torchtrim.records.budget import memory_limit
from torchtrim.workflows.optimize.fitting import Fit


class Wrapped(nn.Module):
    """A model within another; `again`: checkpointed there by its author."""

    def __init__(self, inner: nn.Module, again: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.again:
            out: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return out
        return self.inner(x)  # type: ignore[no-any-return]


def smallest(step: TrainStep) -> Fit:
    """The plan with the smallest peak, measured, and equal to the original bit for bit."""
    found = fitting(step).smallest()
    assert found.planned is not None
    assert found.certificate is not None
    assert found.certificate.verdict == "BITWISE"
    assert found.planned.peak_bytes < found.original.peak_bytes
    return found


@pytest.mark.slow
def test_a_tighter_budget_never_has_a_higher_peak() -> None:
    """pytorch#197838: `activation_memory_budget` at 0.05 takes four times the memory of 0.15."""
    fits = fitting(train_step(encoder(layers=2), torch.randn(8, 48, 32)))
    low, whole = fits.smallest().plan.predicted.peak_bytes, fits.observe().peak_bytes
    budgets = [low + (whole - low) * percent // 100 for percent in (5, 15, 70)]
    peaks = []
    for budget in budgets:
        planned = fits.fit(memory_limit(budget)).planned
        assert planned is not None
        assert planned.peak_bytes <= budget
        peaks.append(planned.peak_bytes)
    assert all(a <= b for a, b in pairwise(peaks))


@pytest.mark.parametrize("seed", draws.some(range(1000, 1200)))
def test_no_solver_goes_over_its_own_budget(seed: int) -> None:
    """pytorch#197871: a knapsack of three items of one byte and a budget of one gives back two."""
    rng = random.Random(seed)
    problem = problem_of(rng, rng.randrange(2, 12))
    solved = search(problem)
    assert solved is not None
    low, high = solved.front.lowest.peak_bytes, problem.run(()).peak_bytes
    for budget in {low, high, rng.randint(low, high), rng.randint(low, high)}:
        point = solved.front.within(budget)
        assert point is not None
        assert peak(problem.step, [problem.edits[i] for i in point.chosen]) <= budget


def test_backward_sees_the_mask_of_forward() -> None:
    """pytorch#190717: at a low budget dropout's gradient is of another mask."""
    model = nn.Sequential(
        *[
            part
            for _ in range(4)
            for part in (nn.Linear(32, 32), nn.Dropout(0.5), nn.GELU(), nn.Dropout(0.3))
        ]
    )
    found = smallest(train_step(model, torch.randn(256, 32)))
    where = [place for one in found.plan.techniques for place in one.where]
    assert any("1" in place or "3" in place for place in where)


@pytest.mark.slow
def test_statistics_are_updated_once() -> None:
    """pytorch#96136: under a checkpoint BatchNorm counts each batch twice."""
    model = ConvNet()
    step = train_step(model, images(16, 4))
    plan = smallest(step).plan
    applied = torchtrim.apply(plan, model, *step.optimizers)
    before = [int(block.norm.num_batches_tracked) for block in model.blocks]
    squared(model, images(16, 4)).backward()
    after = [int(block.norm.num_batches_tracked) for block in model.blocks]
    assert after == [count + 1 for count in before]
    applied.revert()


@pytest.mark.slow
def test_two_backward_passes_over_one_model_need_less_not_more() -> None:
    """pytorch#193193: a compiled backward of two checkpointed traversals takes 2.3 times eager's peak."""
    model = encoder(layers=3)

    def twice(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return squared(model, batch) + squared(model, batch.flip(0))

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    smallest(TrainStep(model, twice, optimizer, torch.randn(8, 48, 32)))


@pytest.mark.slow
@pytest.mark.parametrize("outside", [False, True])
def test_what_a_plan_saves_does_not_depend_on_what_is_wrapped_first(outside: bool) -> None:
    """pytorch#161889: a selective checkpoint wrapped the other way round saves next to nothing."""
    inner = ConvNet()
    step = (
        train_step(Wrapped(inner), images(16, 4)) if outside else train_step(inner, images(16, 4))
    )
    found = smallest(step)
    assert found.planned is not None
    assert found.planned.peak_bytes == found.plan.predicted.peak_bytes


def test_a_model_that_its_author_checkpoints_is_planned_within() -> None:
    found = fitting(train_step(Wrapped(ConvNet(), again=True), images(16, 4))).smallest()
    if found.planned is not None:
        assert found.certificate is not None
        assert found.certificate.verdict == "BITWISE"
        assert found.planned.peak_bytes < found.original.peak_bytes
