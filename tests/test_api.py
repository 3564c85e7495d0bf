"""The verbs from Python, on live models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torchtrim
from steps import STEPS, ConvNet, images, squared, train_step
from torchtrim import ApplyFailed, InfeasibleBudget, Inference, TrainStep, Unsupported, api
from torchtrim.techniques.recompute import rerun


@pytest.mark.parametrize("name", STEPS)
def test_fit_holds_the_budget_and_reverts(name: str) -> None:
    torch.manual_seed(0)
    step = STEPS[name]()
    model = step.model
    classes = [type(m) for m in model.modules()]
    state = copy.deepcopy(model.state_dict())
    with torchtrim.fit(step, "93%", steps=2) as fitted:
        assert fitted.planned is not None
        assert fitted.certificate is not None
        assert fitted.planned.peak_bytes <= fitted.plan.budget_bytes < fitted.original.peak_bytes
        assert fitted.certificate.verdict == "BITWISE"
        changed = zip(model.modules(), classes, strict=True)
        assert any(type(m) is not kind for m, kind in changed)  # equal, but not the same
        step.step(0)
    assert all(type(m) is kind for m, kind in zip(model.modules(), classes, strict=True))
    assert model.state_dict().keys() == state.keys()


def test_what_fits_already_is_left_alone() -> None:
    step = train_step(ConvNet(4, 2), images(8, 2))
    fitted = torchtrim.fit(step, "1GiB", steps=1)
    assert fitted.planned is None
    assert fitted.certificate is None
    assert fitted.plan.techniques == ()


@pytest.mark.slow
def test_what_cannot_fit_says_what_would() -> None:
    torch.manual_seed(0)
    step = train_step(ConvNet(), images())
    with pytest.raises(InfeasibleBudget) as caught:
        torchtrim.fit(step, 1000)
    smallest = caught.value.smallest_bytes
    assert "set by" in str(caught.value)
    assert torchtrim.fit(step, int(smallest * 1.01)).planned is not None


@pytest.mark.slow
@pytest.mark.usefixtures("without_replay")
def test_an_unequal_plan_is_not_left_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    step = train_step(ConvNet(), images())
    run = rerun.run_again
    monkeypatch.setattr(rerun, "run_again", lambda *a, **k: run(*a, **k) * 1.01)
    with pytest.raises(ApplyFailed, match="does not equal"):
        torchtrim.fit(step, "93%", steps=1)
    assert type(step.model.blocks[0]).__mro__[1] is nn.Module


def test_plan_apply_verify() -> None:
    torch.manual_seed(0)
    step = train_step(ConvNet(), images())
    plan = torchtrim.plan(step, "93%")
    assert torchtrim.verify(step, plan, steps=1).verdict == "BITWISE"
    handle = torchtrim.apply(plan, step.model)
    handle.revert()
    with pytest.raises(ApplyFailed, match="another ConvNet"):
        torchtrim.apply(plan, ConvNet(width=4))


def test_record_and_diagnose() -> None:
    torch.manual_seed(0)
    step = train_step(ConvNet(), images())
    profile = torchtrim.record(step)
    assert profile.peak_bytes > 0
    assert [call.depth for call in profile.calls].count(0) == 1
    assert "TT203" in {finding.code for finding in torchtrim.diagnose(step)}


@pytest.mark.parametrize("inputs", [images(8, 2), (images(8, 2),), {"x": images(8, 2)}])
def test_inference(inputs: object) -> None:
    model = ConvNet(4, 2).eval()
    profile = torchtrim.record(Inference(model, inputs))
    assert {op.phase for op in profile.operators} <= {"forward", "other"}
    assert all(not call.graded for call in profile.calls)
    with pytest.raises(InfeasibleBudget):
        torchtrim.plan(Inference(model, inputs), "50%")


def test_a_failing_step_leaves_everything() -> None:
    model = ConvNet(4, 2)
    state = copy.deepcopy(model.state_dict())
    call = nn.Module.__call__

    def breaks(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        squared(model, batch).backward()
        raise ValueError("no loss today")

    step = TrainStep(model, breaks, torch.optim.Adam(model.parameters()), images(8, 2))
    with pytest.raises(ValueError, match="no loss today"):
        torchtrim.record(step)
    assert nn.Module.__call__ is call
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torchtrim.record(train_step(model, images(8, 2))).operators


def test_lazy_models_are_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    step = TrainStep(model, squared, torch.optim.SGD(model.parameters(), 0.1), torch.randn(2, 3))
    with pytest.raises(Unsupported, match="lazy"):
        torchtrim.record(step)


class Remembers(nn.Module):
    """A model that keeps state in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls = 0
        self.seen: list[int] = []
        self.average = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(len(x))
        y = self.linear(x)
        self.average.mul_(0.9).add_(y.detach().mean(0))
        self.last = y
        return y


def test_plain_attributes_are_put_back() -> None:
    model = Remembers()
    seen, average = model.seen, model.average
    torchtrim.record(train_step(model, torch.randn(2, 3)))
    assert model.calls == 0
    assert model.seen is seen
    assert seen == []
    assert model.average is average
    assert not average.any()
    assert not hasattr(model, "last")


def test_an_optimizer_with_a_closure_is_refused() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(torchtrim.UsageError, match="closure"):
        TrainStep(model, squared, torch.optim.LBFGS(model.parameters()), torch.randn(2, 3))


def test_public_names() -> None:
    for name in torchtrim.__all__:
        assert getattr(torchtrim, name) is not None
    assert set(torchtrim.__all__) <= set(dir(torchtrim))
    with pytest.raises(AttributeError, match="nothing"):
        torchtrim.nothing  # noqa: B018


@pytest.mark.parametrize("old", api._RENAMED)
def test_an_old_name_works_with_a_warning(old: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"use torchtrim.api.{api._RENAMED[old]}"):
        renamed = getattr(api, old)
    assert renamed is getattr(api, api._RENAMED[old])
