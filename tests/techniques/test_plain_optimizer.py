"""Optimizers that step in chunks are the same to the bit; fused ones are where rounding is allowed."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import torchtrim
from steps import squared
from torchtrim.errors import ApplyFailed
from torchtrim.planner.planner import Planner
from torchtrim.records.budget import Budget
from torchtrim.records.plan import Technique
from torchtrim.records.trial import Request
from torchtrim.techniques.plain_optimizer import TECHNIQUE
from torchtrim.workflows.optimize.fitting import Fitting

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.1}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam": ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
    "AdamW": ("AdamW", {"lr": 0.01}),
    "RMSprop": ("RMSprop", {"momentum": 0.9, "centered": True}),
    "Adagrad": ("Adagrad", {"lr": 0.05, "lr_decay": 0.01}),
    "Adadelta": ("Adadelta", {}),
    "Adamax": ("Adamax", {}),
    "ASGD": ("ASGD", {}),
    "NAdam": ("NAdam", {}),
    "RAdam": ("RAdam", {}),
    "Rprop": ("Rprop", {}),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(37, 64), nn.Tanh(), nn.Linear(64, 51), nn.Tanh(), nn.Linear(51, 3)
    )


def optimizer_of(net: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Two groups with settings of their own, `foreach`."""
    name, settings = KINDS[kind]
    parameters = list(net.parameters())
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.003}]
    made: torch.optim.Optimizer = getattr(torch.optim, name)(groups, foreach=True, **settings)
    return made


def trained(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    first: int = 0,
    scheduler: Any = None,
) -> None:
    for number in range(first, first + steps):
        torch.manual_seed(number)
        squared(net, torch.randn(8, 37)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def plan_for(optimizer: torch.optim.Optimizer, **options: Any) -> Technique:
    return Technique(name="plain_optimizer", where=(type(optimizer).__name__,), options=options)


def applied(optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    return TECHNIQUE.apply({type(optimizer).__name__: optimizer}, plan_for(optimizer, **options))


def assert_same(
    net: nn.Module, other: nn.Module, one: torch.optim.Optimizer, two: torch.optim.Optimizer
) -> None:
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    mine, yours = one.state_dict(), two.state_dict()
    assert mine["param_groups"] == yours["param_groups"]
    assert mine["state"].keys() == yours["state"].keys()
    for key, state in mine["state"].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(yours["state"][key][name]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [1, 10_000])
def test_chunks_are_the_same_to_the_bit(kind: str, most: int) -> None:
    net, other = network(), network()
    original, planned = optimizer_of(net, kind), optimizer_of(other, kind)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 3) for o in (original, planned)]
    handle = applied(planned, style="chunks", chunk_bytes=most)
    trained(net, original, 6, scheduler=schedulers[0])
    trained(other, planned, 6, scheduler=schedulers[1])
    assert_same(net, other, original, planned)
    handle.revert()
    trained(net, original, 2, 6)
    trained(other, planned, 2, 6)
    assert_same(net, other, original, planned)


class Loop:
    """A loop with a scheduler and accumulation, whose state can be saved and loaded. `clips`: the largest
    norm of all gradients, 0 for any."""

    def __init__(self, kind: str, backwards: int = 1, clips: float = 0.0) -> None:
        self.net = network()
        self.optimizer = optimizer_of(self.net, kind)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.backwards, self.clips = backwards, clips

    def train(self, first: int, last: int) -> None:
        for number in range(first, last):
            for part in range(self.backwards):
                torch.manual_seed(10 * number + part)
                squared(self.net, torch.randn(8, 37)).backward()
            if self.clips:
                nn.utils.clip_grad_norm_(self.net.parameters(), self.clips)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def saved(self) -> dict[str, Any]:
        parts = self.net, self.optimizer, self.scheduler
        return copy.deepcopy({str(n): part.state_dict() for n, part in enumerate(parts)})

    def load(self, state: dict[str, Any]) -> None:
        for number, part in enumerate((self.net, self.optimizer, self.scheduler)):
            part.load_state_dict(state[str(number)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SGD", "momentum", "Adam", "AdamW", "RMSprop", "Adagrad"])
def test_chunks_are_the_same_over_a_thousand_steps(kind: str) -> None:
    original, planned, loaded = (Loop(kind, 2, clips=0.1) for _ in range(3))
    for run in (planned, loaded):
        applied(run.optimizer, style="chunks", chunk_bytes=10_000)
    original.train(0, 1000)
    planned.train(0, 500)
    loaded.load(planned.saved())
    loaded.train(500, 1000)
    assert_same(original.net, loaded.net, original.optimizer, loaded.optimizer)


def test_a_fused_step_is_equal_up_to_rounding_and_leaves_no_trace() -> None:
    net, other = network(), network()
    original, planned = optimizer_of(net, "AdamW"), optimizer_of(other, "AdamW")
    handle = applied(planned, style="fused")
    trained(net, original, 5)
    trained(other, planned, 5)
    assert original.state_dict()["param_groups"] == planned.state_dict()["param_groups"]
    pairs = list(zip(net.parameters(), other.parameters(), strict=True))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)
    assert not all(torch.equal(a, b) for a, b in pairs)
    handle.revert()
    assert "step" not in vars(planned)


def test_a_scheduler_made_afterwards_is_told_of_steps() -> None:
    net = network()
    optimizer = optimizer_of(net, "AdamW")
    handle = applied(optimizer, style="chunks", chunk_bytes=1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(net, optimizer, 2, scheduler=scheduler)
        handle.revert()
        trained(net, optimizer, 2, 2, scheduler=scheduler)


def test_a_step_with_a_closure_runs_as_it_is() -> None:
    net, other = network(), network()
    original, planned = optimizer_of(net, "AdamW"), optimizer_of(other, "AdamW")
    applied(planned, style="chunks", chunk_bytes=1)
    for model, optimizer in ((net, original), (other, planned)):
        batch = torch.ones(8, 37)

        def closure(model: nn.Module = model, batch: torch.Tensor = batch) -> torch.Tensor:
            loss = squared(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
    assert_same(net, other, original, planned)


def test_groups_are_whole_again_after_a_step_that_fails() -> None:
    net = network()
    optimizer = optimizer_of(net, "AdamW")
    applied(optimizer, style="chunks", chunk_bytes=1)
    trained(net, optimizer, 1)
    groups = optimizer.param_groups
    squared(net, torch.randn(8, 37)).backward()
    first = next(net.parameters())
    optimizer.state[first]["exp_avg"] = torch.zeros(1, 2, 3, 4, 5)
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert optimizer.param_groups is groups


def test_what_is_not_understood_is_refused() -> None:
    net = network()

    class AdamW(torch.optim.AdamW):
        pass

    theirs = AdamW(net.parameters(), foreach=True)
    with pytest.raises(ApplyFailed, match="only torch's own optimizers"):
        applied(theirs, style="chunks", chunk_bytes=1)
    hooked = optimizer_of(net, "AdamW")
    hooked.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ApplyFailed, match="its own step hooks"):
        applied(hooked, style="chunks", chunk_bytes=1)
    with pytest.raises(ApplyFailed, match="no fused kernel"):
        applied(optimizer_of(net, "RMSprop"), style="fused")
    with pytest.raises(ApplyFailed, match="the style 'other'"):
        applied(optimizer_of(net, "RMSprop"), style="other")


def wide_step(**settings: Any) -> torchtrim.TrainStep:
    """A step whose peak is what `foreach` makes of all parameters."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
    optimizer = torch.optim.AdamW(net.parameters(), **settings)
    return torchtrim.TrainStep(net, squared, optimizer, torch.randn(8, 128))


def test_it_is_planned_to_the_byte_and_certified_and_reverted() -> None:
    step = wide_step(foreach=True)
    (optimizer,) = step.optimizers
    with torchtrim.fit(step, "85%", steps=2) as fitted:
        assert [(one.name, one.where) for one in fitted.plan.techniques] == [
            ("plain_optimizer", ("AdamW",))
        ]
        assert fitted.certificate is not None
        assert fitted.certificate.verdict == "BITWISE"
        assert fitted.planned is not None
        assert fitted.planned.peak_bytes == fitted.plan.predicted.peak_bytes
        assert "step" in vars(optimizer)
    assert "step" not in vars(optimizer)


def test_options_exist_only_where_an_optimizer_allocates() -> None:
    original = Fitting(wide_step(foreach=False), Request(steps=1), lambda _: None).observe()
    assert original.profile is not None
    (seen,) = original.profile.optimizer_steps
    assert (seen.optimizer, seen.type) == ("AdamW", "torch.optim.adamw.AdamW")
    assert len(seen.updates) == 12
    assert all(update.added == 1 and len(update.states) == 3 for update in seen.updates)
    for allow, styles in (("BITWISE", []), ("ROUNDING", ["fused"])):
        planner = Planner(
            original.profile,
            step_seconds=0.01,
            fingerprint={},
            exclude=("optimizer_in_backward",),
            allow=allow,  # type: ignore[arg-type]
        )
        chosen = planner.floor_plan(Budget(0)).techniques
        assert [one.options["style"] for one in chosen] == styles


def test_a_parameter_that_trains_later_joins_a_fused_step() -> None:
    left = []
    for planned in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).requires_grad_(False)
        net[0].requires_grad_()
        opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        if planned:
            plan = Technique(name="plain_optimizer", where=("SGD",), options={"style": "fused"})
            TECHNIQUE.apply({"SGD": opt}, plan)
        for step in range(6):
            net[1].requires_grad_(step >= 3)
            net(torch.ones(2, 8)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        left.append(net.state_dict())
    assert all(torch.allclose(left[0][key], left[1][key]) for key in left[0])
