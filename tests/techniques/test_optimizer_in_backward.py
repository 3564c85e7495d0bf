"""Gradients that are used as soon as they are final: the same to the bit, and refused where they are read."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import torchtrim
from steps import squared
from techniques.test_plain_optimizer import (
    KINDS,
    Loop,
    assert_same,
    wide_step,
)
from torchtrim.capture.spent import Spent
from torchtrim.core.units import format_bytes
from torchtrim.errors import ApplyFailed
from torchtrim.executor.failing import place_of
from torchtrim.executor.registry import names
from torchtrim.planner.planner import Planner
from torchtrim.records.budget import Budget, memory_limit
from torchtrim.records.plan import Technique
from torchtrim.records.terms import Terms
from torchtrim.records.trial import Request, Trial
from torchtrim.step.from_profile import step_of
from torchtrim.techniques.optimizer_in_backward.technique import TECHNIQUE
from torchtrim.workflows.optimize.fitting import Fitting

NAME = "optimizer_in_backward"


def applied(optimizer: torch.optim.Optimizer, backwards: int = 1) -> Any:
    name = type(optimizer).__name__
    plan = Technique(name=NAME, where=(name,), options={"backwards": backwards})
    return TECHNIQUE.apply({name: optimizer}, plan)


class Run(Loop):
    """A loop, with the technique or without."""

    def __init__(self, kind: str, backwards: int = 1, early: bool = False) -> None:
        super().__init__(kind, backwards)
        self.handle = applied(self.optimizer, backwards) if early else None


def same(one: Run, other: Run) -> None:
    assert_same(one.net, other.net, one.optimizer, other.optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_same_to_the_bit(kind: str) -> None:
    original, planned = Run(kind, 2), Run(kind, 2, early=True)
    original.train(0, 4)
    planned.train(0, 4)
    same(original, planned)
    again = Run(kind, 2, early=True)
    again.load(planned.saved())
    for run in (original, planned, again):
        run.train(4, 6)
    same(original, planned)
    same(original, again)
    assert planned.handle is not None
    planned.handle.revert()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in planned.net.parameters())
    original.train(6, 7)
    planned.train(6, 7)
    same(original, planned)


def clip_each(net: nn.Module) -> None:
    """Clip the gradient of each parameter by its own norm as soon as it was added to."""

    def clip(parameter: torch.Tensor) -> None:
        torch.nn.utils.clip_grad_norm_([parameter], 0.1)

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(clip)


class ClippedRun(Run):
    """A loop that clips each parameter by itself."""

    def __init__(self, kind: str, backwards: int = 1, early: bool = False) -> None:
        super().__init__(kind, backwards)
        clip_each(self.net)
        self.handle = applied(self.optimizer, backwards) if early else None


def test_groups_that_change_later_hold_from_then_on() -> None:
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        handle = applied(optimizer) if planned else None
        for step in range(8):
            if step == 4:
                (group,) = optimizer.param_groups
                slow = {**group, "params": group["params"][:2], "lr": 0.001}
                optimizer.param_groups = [slow, {**group, "params": group["params"][2:]}]
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
        if handle is not None:
            handle.revert()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


def test_clipping_each_parameter_by_itself_goes_with_it() -> None:
    original, planned, free = ClippedRun("AdamW", 2), ClippedRun("AdamW", 2, True), Run("AdamW", 2)
    for run in (original, planned, free):
        run.train(0, 3)
    same(original, planned)
    assert not torch.equal(original.net[0].weight, free.net[0].weight)


@pytest.mark.slow
@pytest.mark.parametrize("Run", [Run, ClippedRun])
@pytest.mark.parametrize("kind", ["SGD", "momentum", "Adam", "AdamW", "RMSprop", "Adagrad"])
def test_it_is_the_same_over_a_thousand_steps(kind: str, Run: type[Run]) -> None:  # noqa: N803
    backwards = 2
    original, planned = Run(kind, backwards), Run(kind, backwards, early=True)
    original.train(0, 1000)
    planned.train(0, 500)
    loaded = Run(kind, backwards, early=True)
    loaded.load(planned.saved())
    loaded.train(500, 1000)
    same(original, loaded)


def test_gradients_never_lie_there_together() -> None:
    run = Run("AdamW", early=True)
    alive: list[int] = []
    for parameter in run.net.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(
                sum(
                    p.grad is not None and not isinstance(p.grad, Spent)
                    for p in run.net.parameters()
                )
            )
        )
    run.train(0, 2)
    assert len(alive) == 12
    assert max(alive) == 0


def test_fewer_backwards_leave_the_update_to_the_step() -> None:
    """pytorch#124523: accumulated gradients are not updated before the last backward."""
    original, planned = Run("AdamW", 3), Run("AdamW", 3, early=True)
    for run in (original, planned):
        run.train(0, 2)
        run.backwards = 2
        run.train(2, 4)
    same(original, planned)


def loss_of(run: Run) -> torch.Tensor:
    return squared(run.net, torch.randn(8, 37))


def fails(run: Run) -> str:
    """What it says, which names the optimizer for the plan to do without."""
    with pytest.raises(ApplyFailed) as caught:
        run.train(1, 2)
    assert place_of(caught.value) == "AdamW"
    return str(caught.value)


READS = {
    "clip": lambda run: torch.nn.utils.clip_grad_norm_(run.net.parameters(), 1.0),
    "clip value": lambda run: torch.nn.utils.clip_grad_value_(run.net.parameters(), 1.0),
    "norm": lambda run: [p.grad.norm() for p in run.net.parameters()],
    "clone": lambda run: [p.grad.clone() for p in run.net.parameters()],
    "max": lambda run: [float(p.grad.abs().max()) for p in run.net.parameters()],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_a_gradient_after_the_step_is_refused(read: Any) -> None:
    run = Run("AdamW", early=True)
    run.optimizer.zero_grad = lambda *_: None  # type: ignore[method-assign, assignment]
    run.train(0, 1)
    with pytest.raises(ApplyFailed, match="optimizer_in_backward has used it up") as caught:
        read(run)
    assert place_of(caught.value) == "AdamW"


def test_reading_a_gradient_that_the_source_does_not_show_is_refused() -> None:
    run = Run("AdamW", early=True)
    gradients = lambda: [getattr(p, "gr" + "ad").norm() for p in kept]  # noqa: E731
    kept = tuple(run.net.parameters())
    hidden = functools.partial(map, lambda read: read(), [gradients])

    def step() -> None:
        loss_of(run).backward()
        list(hidden())
        run.optimizer.step()

    with pytest.raises(ApplyFailed, match="optimizer_in_backward has used it up"):
        step()


def test_more_backwards_are_refused() -> None:
    run = Run("AdamW", early=True)
    run.backwards = 2
    assert "adds to a gradient" in fails(run)


def test_gradients_that_are_never_zeroed_are_refused() -> None:
    run = Run("AdamW", early=True)
    run.optimizer.zero_grad = lambda *_: None  # type: ignore[method-assign, assignment]
    run.train(0, 1)
    assert "adds to a gradient" in fails(run)


def test_a_learning_rate_that_changes_in_between_is_refused() -> None:
    run = Run("AdamW", early=True)
    squared(run.net, torch.randn(8, 37)).backward()
    run.optimizer.param_groups[1]["lr"] = 0.5
    with pytest.raises(ApplyFailed, match="changed between backward and `step`"):
        run.optimizer.step()


@pytest.mark.parametrize(
    "change",
    [
        lambda run: run.optimizer.zero_grad(),
        lambda run: setattr(next(run.net.parameters()), "grad", torch.zeros(64, 37)),
    ],
    ids=["dropped", "replaced"],
)
def test_gradients_that_are_dropped_or_replaced_are_refused(change: Any) -> None:
    run = Run("AdamW", early=True)
    changing = iter([change])

    def step() -> None:
        loss_of(run).backward()
        next(changing)(run)
        run.optimizer.step()

    with pytest.raises(ApplyFailed, match="dropped or replaced"):
        step()


def test_a_second_step_is_refused() -> None:
    run = Run("AdamW", early=True)
    run.optimizer.zero_grad = lambda *_: None  # type: ignore[method-assign, assignment]
    run.train(0, 1)
    before = [parameter.clone() for parameter in run.net.parameters()]
    with pytest.raises(ApplyFailed, match="called again"):
        run.optimizer.step()
    assert all(map(torch.equal, run.net.parameters(), before))


def test_a_hook_between_backward_and_step_is_refused() -> None:
    run = Run("AdamW", early=True)

    def step() -> None:
        loss_of(run).backward()
        run.optimizer.register_step_pre_hook(lambda *_: None)
        run.optimizer.step()

    with pytest.raises(ApplyFailed, match="step hooks"):
        step()


def test_what_is_ahead_of_its_step_is_not_saved() -> None:
    run = Run("AdamW", early=True)
    assert run.handle is not None

    def step() -> None:
        loss_of(run).backward()
        with pytest.raises(ApplyFailed, match="continues without"):
            run.optimizer.state_dict()
        with pytest.raises(ApplyFailed, match="continues without"):
            run.handle.check_settled()
        run.optimizer.step()

    step()
    run.handle.check_settled()
    run.optimizer.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_in_the_order_of_the_original(kind: str) -> None:
    original, planned = Run(kind), Run(kind, early=True)
    for run in (original, planned):
        run.net[4].weight.requires_grad_(False)
        run.train(0, 2)
    one, other = (run.optimizer.state_dict()["state"] for run in (original, planned))
    assert list(one) == list(other)
    assert [list(state) for state in one.values()] == [list(state) for state in other.values()]


def test_a_plan_without_its_count_is_refused() -> None:
    run = Run("AdamW")
    with pytest.raises(ApplyFailed, match="has one option, `backwards`"):
        applied(run.optimizer, 0)


@pytest.mark.parametrize("settings", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_it_is_planned_to_the_byte_and_certified(settings: dict[str, bool]) -> None:
    found = Fitting(
        wide_step(**settings), Request(steps=2), lambda _: None, Terms(exclude=("recompute",))
    ).smallest()
    (chosen,) = found.plan.techniques
    assert (chosen.name, chosen.options) == (NAME, {"backwards": 1})
    assert found.certificate is not None
    assert found.certificate.verdict == "BITWISE"
    assert any("12 gradients" in said for said in found.certificate.compared)
    assert found.planned is not None
    assert found.planned.peak_bytes == found.plan.predicted.peak_bytes < found.original.peak_bytes


def test_an_update_that_writes_into_its_gradient_is_certified() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, nesterov=True, foreach=True)
    step = torchtrim.TrainStep(net, squared, optimizer, torch.randn(8, 128))
    others = Terms(exclude=("recompute", "plain_optimizer"))
    found = Fitting(step, Request(steps=2), lambda _: None, others).smallest()
    assert [one.name for one in found.plan.techniques] == [NAME]
    assert found.certificate is not None
    assert found.certificate.verdict == "BITWISE"


def test_a_live_step_is_fitted_and_reverted() -> None:
    step = wide_step()
    (optimizer,) = step.optimizers
    with torchtrim.fit(step, "85%", steps=2) as fitted:
        assert [one.name for one in fitted.plan.techniques] == [NAME]
        assert "step" in vars(optimizer)
        step.step(0)
    assert "step" not in vars(optimizer)
    assert not any(p._post_accumulate_grad_hooks for p in step.model.parameters())
    assert all(p.grad is None for p in step.model.parameters())


def names_planned(trial: Trial) -> list[str]:
    assert trial.profile is not None
    planner = Planner(trial.profile, step_seconds=0.01, fingerprint={}, exclude=("recompute",))
    return [one.name for one in planner.floor_plan(Budget(0)).techniques]


def observed(step: torchtrim.TrainStep) -> Trial:
    return Fitting(step, Request(steps=1), lambda _: None).observe()


class Clipping(torchtrim.TrainStep):
    """A step that reads its gradients between backward and the optimizer's step."""

    def step(self, number: int, dtype: torch.dtype | None = None) -> None:
        squared(self.model, self.batch).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        (optimizer,) = self.optimizers
        optimizer.step()
        optimizer.zero_grad()


class Filling(torchtrim.TrainStep):
    """A step that fills its gradients with zeros."""

    def step(self, number: int, dtype: torch.dtype | None = None) -> None:
        squared(self.model, self.batch).backward()
        (optimizer,) = self.optimizers
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def test_a_missed_budget_says_what_clipping_costs_it() -> None:
    step = wide_step()
    clipping = Clipping(step.model, squared, step.optimizers[0], step.batch)
    others = [name for name in names() if name != NAME]
    found = Fitting(clipping, Request(steps=1), lambda _: None, Terms(exclude=others)).nearest(
        memory_limit("1%")
    )
    assert found.missed is not None
    (said,) = (note for note in found.notes if note.startswith(NAME))
    gradients = sum(p.nbytes for p in step.model.parameters())
    assert "norm" in said
    assert f"all {format_bytes(gradients)} of them are kept" in said
    assert "would run forward and backward twice" in said
    unclipped = observed(wide_step())
    assert unclipped.profile is not None
    assert not [*TECHNIQUE.refusals(step_of(unclipped.profile, unclipped.seconds))]


@pytest.mark.parametrize("kind", [Clipping, Filling])
def test_it_is_not_planned_where_gradients_are_read_or_kept(
    kind: type[torchtrim.TrainStep],
) -> None:
    plain = wide_step(foreach=True)
    assert NAME in names_planned(observed(plain))
    optimizer = torch.optim.AdamW(plain.model.parameters(), foreach=True)
    step = kind(plain.model, squared, optimizer, plain.batch)
    assert names_planned(observed(step)) == ["plain_optimizer"]


def test_a_tied_parameter_is_updated_once() -> None:
    nets = [nn.Sequential(nn.Linear(37, 37), nn.Tanh(), nn.Linear(37, 37)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    for net in nets:
        net[2].weight = net[0].weight
    one, two = (torch.optim.Adam(net.parameters()) for net in nets)
    applied(two)
    for net, optimizer in zip(nets, (one, two), strict=True):
        for number in range(3):
            torch.manual_seed(number)
            squared(net, torch.randn(8, 37)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(nets[0], nets[1], one, two)


class Watching(torchtrim.TrainStep):
    """A step that reads a gradient, but only from its second time on."""

    def step(self, number: int, dtype: torch.dtype | None = None) -> None:
        squared(self.model, self._batch_of(number, dtype)).backward()
        if number > 1:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        (optimizer,) = self.optimizers
        optimizer.step()
        optimizer.zero_grad()


def test_where_a_later_step_reads_a_gradient_another_technique_is_planned() -> None:
    plain = wide_step(foreach=True)
    step = Watching(plain.model, squared, plain.optimizers[0], plain.batch)
    found = Fitting(
        step, Request(steps=2), lambda _: None, Terms(exclude=("recompute",))
    ).smallest()
    assert [one.name for one in found.plan.techniques] == ["plain_optimizer"]
    assert found.certificate is not None
    assert found.certificate.verdict == "BITWISE"


def test_it_works_on_an_emulated_device() -> None:
    with torchtrim.emulate():
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6))).to("cuda")
        optimizer = torch.optim.AdamW(net.parameters())
        batch = torch.randn(8, 128, device="cuda")
        step = torchtrim.TrainStep(net, squared, optimizer, batch)
        others = "recompute", "offload_optimizer"
        found = Fitting(step, Request(steps=1), lambda _: None, Terms(exclude=others)).smallest()
    assert [one.name for one in found.plan.techniques] == [NAME]
    assert found.certificate is not None
    assert found.certificate.verdict == "BITWISE"
    assert found.planned is not None
    assert found.planned.peak_bytes == found.plan.predicted.peak_bytes
