"""What running a part again keeps: its arguments, and what they had."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from profiles import training_step
from steps import Fitting, fitting, quiet, train_step
from torchtrim.capture.workload import TrainStep
from torchtrim.records.budget import Budget
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Profile
from torchtrim.records.terms import Terms
from torchtrim.records.trial import Request
from torchtrim.step.edits import Edit, Insert
from torchtrim.step.from_profile import step_of
from torchtrim.step.index import index_of
from torchtrim.step.rerun import rerun
from torchtrim.step.simulate import timeline
from torchtrim.step.step import Step


class Cache:
    """Keys, as a decoder keeps them for the words to come."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []


class Block(nn.Module):
    """Puts its key into the cache, and looks at its own alone; what else it is given it does not read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.key, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, cache: Cache, unread: list[torch.Tensor]) -> torch.Tensor:
        key = self.key(x).sigmoid()
        cache.keys.append(key)
        return x + self.out(key.tanh())


class Decoder(nn.Module):
    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = Cache()
        for block in self.blocks:
            x = block(x, cache, [x.cos()])
        return x.sigmoid().exp().cos()


def decoder_step() -> object:
    torch.manual_seed(0)
    return train_step(Decoder(), torch.randn(64, 32))


def calls_of(profile: Profile) -> list[tuple[int, ...]]:
    """What each block's arguments had behind them."""
    named = [(profile.modules[call.module].path, call) for call in profile.calls]
    return [call.held for path, call in named if path.count(".") == 2]


def test_a_call_knows_what_its_arguments_had() -> None:
    profile = fitting(decoder_step()).observe().profile
    assert [len(held) for held in calls_of(profile)] == [0, 1, 2, 3]
    keys = {number for held in calls_of(profile) for number in held}
    assert {profile.storages[number].bytes for number in keys} == {64 * 4 * 32 * 4}


def test_what_arguments_had_is_kept_until_the_block_has_run_again() -> None:
    """Predicted is what is measured, to the byte: each block's copy of the cache has the keys before it."""
    where = tuple(f"Decoder.blocks.{number}" for number in range(4))
    terms = Terms(pins={"recompute": where}, exclude=["optimizer_in_backward", "replay"])
    runs = Fitting(decoder_step(), Request(steps=1), quiet, terms)
    plan = runs.planner(runs.observe()).floor_plan(Budget(0))
    assert plan.techniques == (Technique(name="recompute", where=where),)
    assert runs.run_planned(plan).peak_bytes == plan.predicted.peak_bytes


def test_each_backward_of_a_retained_graph_runs_a_block_again() -> None:
    """Predicted is what is measured: what the first backward makes again is gone before the second."""

    def twice(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        return loss * 0.5

    torch.manual_seed(0)
    model = Decoder()
    step = TrainStep(model, twice, torch.optim.SGD(model.parameters()), torch.randn(64, 32))
    where = tuple(f"Decoder.blocks.{number}" for number in range(4))
    terms = Terms(pins={"recompute": where}, exclude=["optimizer_in_backward", "replay"])
    runs = Fitting(step, Request(steps=1), quiet, terms)
    plan = runs.planner(runs.observe()).floor_plan(Budget(0))
    assert plan.techniques == (Technique(name="recompute", where=where),)
    assert runs.run_planned(plan).peak_bytes == plan.predicted.peak_bytes


def first_pass(step: Step, edits: Sequence[Edit] = ()) -> int:
    """The highest bytes before the second backward."""
    begins = [i for i, task in enumerate(step.tasks) if task.name.startswith("aten::ones_like")]
    return max(timeline(step, edits).high[: begins[1]])


def test_what_a_differentiated_backward_saves_is_the_tensor_of_the_rerun() -> None:
    """The gradient of ReLU saves its result for the gradient's gradient: not the one of the first run."""

    def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        loss = model(x).square().mean()
        (given,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + given.square().sum()

    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 32)) for _ in range(3))
    model = nn.Sequential(*layers)
    step = TrainStep(model, penalty, torch.optim.SGD(model.parameters()), torch.randn(64, 32))
    terms = Terms(pins={"recompute": ["Sequential"]}, exclude=["overwrite", "replay"])
    runs = Fitting(step, Request(steps=1), quiet, terms)
    original = step_of(runs.observe().profile)
    edit = rerun(original, [call.span for call in index_of(original).graded_calls[0]])
    assert edit is not None
    plan = runs.planner(runs.observe()).floor_plan(Budget(0))
    assert "recompute" in [one.name for one in plan.techniques]
    assert first_pass(step_of(runs.run_planned(plan).profile)) == first_pass(original, [edit])


def test_a_rerun_stashes_the_state_of_the_generator() -> None:
    """Beside the copy that the first run keeps, there is one while the rerun lasts."""
    step = step_of(training_step(blocks=2, size=2**10))
    (call, *_) = index_of(step).graded_calls[1]

    def insert(state: int) -> Insert:
        overhead = step.overhead._replace(random_state=state)
        edit = rerun(dataclasses.replace(step, overhead=overhead), [call.span])
        assert edit is not None
        return edit.inserts[0]

    assert insert(5056).rise == insert(0).rise + 5056


class Dropped(nn.Module):
    """Puts a result where its last one was, as weights that are dropped out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight = torch.nn.functional.dropout(self.raw)
        return torch.tanh(x @ self.weight)


def test_what_a_block_puts_in_the_place_of_its_last_result_is_kept_once() -> None:
    torch.manual_seed(0)
    step = train_step(nn.Sequential(*[Dropped(64) for _ in range(3)]), torch.randn(128, 64))
    where = tuple(f"Sequential.{number}" for number in range(3))
    terms = Terms(pins={"recompute": where}, exclude=["optimizer_in_backward", "replay"])
    runs = Fitting(step, Request(steps=3), quiet, terms)
    plan = runs.planner(runs.observe()).floor_plan(Budget(0))
    assert plan.techniques == (Technique(name="recompute", where=where),)
    assert runs.run_planned(plan).peak_bytes == plan.predicted.peak_bytes
