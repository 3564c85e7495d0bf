"""Nobody goes away empty-handed: what cannot be met, what fails, and steps of different lengths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchtrim
from steps import Block, fitting, images, quiet, squared, train_step
from torchtrim import InfeasibleBudget, Script, TrainStep
from torchtrim.api import optimize_report
from torchtrim.errors import PlannedStepFailed
from torchtrim.executor.registry import names
from torchtrim.planner.planner import Planner
from torchtrim.records.budget import Budget, memory_limit
from torchtrim.records.plan import Plan
from torchtrim.records.terms import Allowance, Terms
from torchtrim.records.trial import Request, Trial, TrialStep
from torchtrim.runner import trials
from torchtrim.workflows.optimize.fitting import Fitting
from torchtrim.workflows.optimize.levers import FoundPlan, rounded

CATCHES = """
import sys
import torch
from torch import nn

FAILS = sys.argv[1:] == ["fails"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        try:
            if FAILS and torch._C._current_autograd_node() is not None:
                raise ValueError("again?")
            return x + self.b(torch.relu(self.a(x)))
        except Exception as error:
            raise RuntimeError("block failed") from error


torch.manual_seed(0)
model = nn.Sequential(*[Block() for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
for step in range(5):
    optimizer.zero_grad()
    model(torch.randn(1024, 32)).square().mean().backward()
    optimizer.step()
"""

UNEVEN = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for length in (4, 2, 2, 9, 3, 2, 2):
    optimizer.zero_grad()
    losses = [model(torch.randn(64, 64)).square().mean() for _ in range(length)]
    torch.stack(losses).sum().backward()
    optimizer.step()
"""

OTHER_WAYS = """
import torch
from torch import nn


class Either(nn.Module):
    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList(nn.Sequential(*[Block() for _ in range(n)]) for n in (6, 5))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.ways[self.calls > 2](x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


torch.manual_seed(0)
model = Either()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(5):
    optimizer.zero_grad()
    model(torch.randn(1024, 32)).square().mean().backward()
    optimizer.step()
"""


def script_of(folder: Path, text: str, *args: str) -> Script:
    (folder / "train.py").write_text(text)
    return Script(str(folder / "train.py"), args)


def net(*blocks: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.Flatten(), nn.LazyLinear(4))


def step_of(*blocks: nn.Module) -> TrainStep:
    torch.manual_seed(0)
    model = net(*blocks)
    model(images(16))
    return train_step(model, images(16))


def missed(step: TrainStep) -> InfeasibleBudget:
    before = {name: value.tolist() for name, value in step.model.state_dict().items()}
    classes = [type(module) for module in step.model.modules()]
    with pytest.raises(InfeasibleBudget) as caught:
        torchtrim.fit(step, 1000, steps=1)
    assert before == {name: value.tolist() for name, value in step.model.state_dict().items()}
    assert classes == [type(module) for module in step.model.modules()]
    return caught.value


@pytest.mark.slow
def test_what_cannot_be_met_leaves_the_plan_that_needs_least() -> None:
    step = step_of(*(Block(8) for _ in range(3)))
    error = missed(step)
    assert error.plan is not None
    assert error.plan.techniques
    assert error.certificate is not None
    assert error.certificate.verdict == "BITWISE"
    again = fitting(step, 1).run_planned(error.plan)
    assert again.peak_bytes == error.smallest_bytes
    assert torchtrim.fit(step, error.smallest_bytes, steps=1).planned is not None


def mixed() -> TrainStep:
    """Convolutions with ReLUs, at whose outputs the peak is as well as where their backward runs."""
    return step_of(*(nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Tanh()) for _ in range(3)))


@pytest.mark.slow
@pytest.mark.parametrize("make", [mixed, lambda: step_of(*(Block(8) for _ in range(3)))])
def test_what_a_lever_would_reach_is_what_it_reaches(make: Callable[[], TrainStep]) -> None:
    step = make()
    levers = [one for one in missed(step).levers if one.equivalence != "SEMANTIC"]
    assert [lever.source for lever in levers].count("measured") == 1
    assert "recompute" in {name for lever in levers for name in lever.technique.split(" + ")}
    runs = fitting(step, 1)
    original = runs.observe()
    for lever in levers:
        assert lever.peak_bytes < original.peak_bytes
        if lever.source == "measured":
            continue
        planner = runs.planner(original, only=lever.technique)
        bias = original.peak_bytes - planner.simulated_original
        found = runs.run_planned(planner.floor_plan(Budget(0, bias=bias)))
        if (
            lever.technique == "micro_batch"
        ):  # What a part's convolutions take for scratch is bounded.
            assert found.peak_bytes <= 1.05 * lever.peak_bytes
            continue
        assert lever.peak_bytes == pytest.approx(found.peak_bytes, rel=0.05)


@pytest.mark.slow
def test_the_smallest_is_never_above_the_original() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 256))
    step = TrainStep(net, squared, torch.optim.Adafactor(net.parameters()), torch.randn(2, 256))
    error = missed(step)
    assert error.plan is not None
    assert error.plan.techniques == ()
    assert error.certificate is None
    assert error.levers == ()
    assert error.smallest_bytes == fitting(step, 1).observe().peak_bytes


class OnlyOnce(Block):
    """Fails when it runs again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch._C._current_autograd_node() is not None:
            raise ValueError("once only")
        return super().forward(x)


class Drifts(Block):
    """Saves more when it runs again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y.sin().asin() if torch._C._current_autograd_node() is None else y


def fitted_around(step: TrainStep, *barred: str) -> torchtrim.Fitted:
    left = ("optimizer_in_backward",)
    found = Fitting(step, Request(steps=1), lambda _: None, Terms(exclude=left)).nearest(
        memory_limit("60%")
    )
    assert found.certificate is not None
    assert found.certificate.verdict == "BITWISE"
    places = [where for one in found.plan.techniques for where in one.where]
    assert places
    assert not set(places) & set(barred)
    assert any("failed" in note for note in found.notes)
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("without_replay")
@pytest.mark.parametrize("made", [OnlyOnce, Drifts])
def test_a_place_that_fails_is_planned_around(made: type[Block]) -> None:
    step = step_of(Block(8), made(8), Block(8), Block(8))
    fitted_around(step, "Sequential.2")


@pytest.mark.slow
@pytest.mark.usefixtures("without_replay")
def test_a_place_that_no_error_names_is_found_by_halving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "place_of", lambda error: "")
    step = step_of(Block(8), Block(8), OnlyOnce(8), Block(8))
    fitted_around(step, "Sequential.3")


class Towers(nn.Module):
    """Compares each sample of one tower with every sample of the other, as a contrastive loss does."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (
            nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8)))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x).mean(1) @ self.other(x).mean(1).T


@pytest.mark.slow
def test_a_lever_that_fits_was_run_and_leaves_out_what_mixes_samples() -> None:
    torch.manual_seed(0)
    step = train_step(Towers(), torch.randn(16, 64, 32), "SGD")
    found = fitting(step, 1).nearest(memory_limit("30%"))
    assert found.missed is not None
    (lever,) = (one for one in found.levers if one.technique == "micro_batch")
    assert lever.source == "measured"
    assert lever.peak_bytes <= found.budget.bytes


class Mixes(nn.Module):
    """What it gives for a sample hangs on the others, as no part of the batch can know."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(self.a(x).relu())
        return x + y - y.mean(0)


@pytest.mark.slow
def test_a_technique_that_is_refused_everywhere_leaves_the_others() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Mixes() for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    step = TrainStep(model, squared, optimizer, torch.randn(1024, 32))
    left = ("recompute", "split_matmul", "chunked_loss")
    runs = Fitting(step, Request(steps=1), lambda _: None, Terms(allow="ROUNDING", exclude=left))
    found = runs.nearest(memory_limit("25%"))
    assert any("mixes samples" in note for note in found.notes)
    assert "every plan that was tried failed" not in found.notes
    assert found.planned is not None
    assert found.planned.peak_bytes < found.original.peak_bytes
    assert "micro_batch" not in {one.name for one in found.plan.techniques}


@pytest.mark.slow
def test_two_techniques_that_refuse_everywhere_leave_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each refuses at one place after the other, so neither is out of the plan after three rounds."""
    run = Fitting.run_planned

    def refuses(self: Fitting, plan: Plan, *given: Any) -> Trial:
        for one in plan.techniques:
            if one.name != "recompute":
                error = PlannedStepFailed("ApplyFailed: not here", place=one.where[0])
                error.plan = plan
                raise error
        return run(self, plan, *given)

    monkeypatch.setattr(Fitting, "run_planned", refuses)
    blocks = [nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 16)) for _ in range(6)]
    step = train_step(nn.Sequential(*blocks), torch.randn(256, 16), "SGD")
    left = tuple({*names()} - {"split_matmul", "micro_batch", "recompute"})
    runs = Fitting(step, Request(steps=1), quiet, Terms(allow="ROUNDING", exclude=left))
    found = runs.nearest(memory_limit("40%"))
    assert found.planned is not None
    assert found.planned.peak_bytes < found.original.peak_bytes


@pytest.mark.slow
def test_what_fails_everywhere_leaves_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, plan: Any, *_: int) -> Trial:
        error = PlannedStepFailed("no")
        error.plan = plan
        raise error

    step = step_of(Block(8), Block(8))
    runs = fitting(step, 1)
    monkeypatch.setattr(type(runs), "run_planned", fails)
    found = runs.nearest(memory_limit("60%"))
    assert found.missed is not None
    assert found.plan.techniques == ()
    assert found.missed.smallest_bytes == found.original.peak_bytes
    assert "every plan that was tried failed" in found.notes


def test_a_failure_of_the_original_is_the_users() -> None:
    def breaks(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        squared(model, batch).backward()
        raise ValueError("no loss today")

    model = nn.Sequential(nn.Linear(3, 3))
    step = TrainStep(model, breaks, torch.optim.SGD(model.parameters(), 0.1), torch.randn(2, 3))
    with pytest.raises(ValueError, match="no loss today"):
        torchtrim.fit(step, "60%")


@pytest.mark.usefixtures("without_replay")
def test_a_script_whose_blocks_catch_everything_is_planned_and_proven(tmp_path: Path) -> None:
    report = optimize_report(script_of(tmp_path, CATCHES), "80%", Request(steps=1)).report
    assert report.floor_bytes is None
    assert report.plan is not None
    assert "recompute" in [one.name for one in report.plan.techniques]
    assert report.certificate is not None
    assert report.certificate.verdict == "BITWISE"


@pytest.mark.slow
@pytest.mark.usefixtures("without_replay")
def test_a_script_whose_planned_steps_fail_keeps_what_was_learnt(tmp_path: Path) -> None:
    result = optimize_report(script_of(tmp_path, CATCHES, "fails"), "80%", Request(steps=1))
    report = result.report
    assert report.floor_bytes is not None
    assert report.original is not None
    assert report.floor_bytes <= report.original.peak_bytes
    assert report.peak_parts
    assert sum(part.bytes for part in report.peak_parts) <= report.original.peak_bytes
    assert any("block failed" in note for note in report.notes)
    assert result.plan is not None


@pytest.mark.slow
def test_steps_of_different_lengths_are_planned_for_the_longest(tmp_path: Path) -> None:
    result = optimize_report(script_of(tmp_path, UNEVEN), "70%", Request(steps=3))
    report = result.report
    assert any("differ in length" in note for note in report.notes)
    assert report.original is not None
    assert report.planned is not None
    assert report.budget_bytes is not None
    assert report.planned.peak_bytes <= report.budget_bytes == report.original.peak_bytes * 7 // 10
    assert result.before is not None
    assert [call.depth for call in result.before.calls].count(0) == 9
    assert result.before.peak_bytes == report.original.peak_bytes
    assert report.certificate is not None
    assert report.certificate.verdict == "BITWISE"


def test_a_step_that_is_longer_than_the_longest_seen_is_recorded_in_its_turn(
    tmp_path: Path,
) -> None:
    """The step timed after the recorded one shows that it was not the longest: 2 of 1, 2, 4."""
    text = UNEVEN.replace("(4, 2, 2, 9, 3, 2, 2)", "(1, 1, 2, 4, 4, 4, 4, 4)")
    runs = Fitting(script_of(tmp_path, text), Request(steps=1), quiet)
    assert runs.observe_longest().recorded == 3
    assert runs.observe_longest() is runs.original
    assert len(runs.notes) == 1


@pytest.mark.parametrize("later", [2, 9])
def test_a_step_that_takes_another_way_and_needs_more_is_told(tmp_path: Path, later: int) -> None:
    """The original needs less in the other way, and a plan saves nothing of it."""
    script = script_of(tmp_path, OTHER_WAYS.replace("self.calls > 2", f"self.calls > {later}"))
    terms = Terms(exclude=(*({*names()} - {"recompute"}),))
    report = optimize_report(script, "70%", Request(steps=1), terms=terms).report
    assert report.planned is not None
    higher = report.planned.peak_bytes > 1.1 * report.planned.tracked_peak_bytes
    assert higher == (later == 2)
    told = [note for note in report.notes if "steps differ" in note]
    assert len(told) == higher


def test_equal_steps_are_run_once(tmp_path: Path) -> None:
    runs = fitting(step_of(Block(8)), 1)
    first = runs.observe()
    assert runs.observe_longest() is first
    assert runs.notes == []
    assert isinstance(first.steps[0], TrialStep)


def test_techniques_that_only_together_meet_a_budget_are_a_lever() -> None:
    runs = Fitting(mixed(), Request(steps=1), lambda _: None, Terms(allow="rounding"))
    planner = runs.planner(runs.observe())
    assert isinstance(planner, Planner)
    bits = Allowance("BITWISE")
    floor = Budget(planner.floor_plan(Budget(0)).predicted.peak_bytes)

    def found(budget: Budget) -> FoundPlan:
        return FoundPlan(planner.plan(budget), None)

    (lever,) = rounded(lambda: found(floor), floor, (), bits)
    assert (lever.needs, " + " in lever.technique) == ("--allow rounding", True)
    assert lever.peak_bytes <= floor.bytes
    assert rounded(lambda: found(floor), floor, [lever], bits) == ()
    half = floor._replace(bytes=floor.bytes // 2)
    assert rounded(lambda: found(half), half, (), bits) == ()
