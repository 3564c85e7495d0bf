"""BatchNorm replaced: weights stay, samples are kept apart, and parts of the batch become possible."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from steps import ConvNet, images, squared, train_step
from torchtrim.errors import ApplyFailed
from torchtrim.executor.registry import technique
from torchtrim.records.budget import memory_limit
from torchtrim.records.plan import Technique
from torchtrim.records.terms import Terms
from torchtrim.records.trial import Request
from torchtrim.techniques.replace_norm.technique import TECHNIQUE, TO
from torchtrim.workflows.optimize.fitting import Fitting


def part_of(to: str, where: str = "ConvNet", **options: Any) -> Technique:
    return Technique(name="replace_norm", where=(where,), options={"to": to, **options})


def trained(width: int = 8) -> ConvNet:
    """A network whose statistics and weights are no longer those of the beginning."""
    torch.manual_seed(0)
    net = ConvNet(width, 2)
    step = train_step(net, images(8))
    for number in range(2):
        step.step(number)
    return net


def expected(to: str, norm: nn.BatchNorm2d, groups: int, x: torch.Tensor) -> torch.Tensor:
    if to == "frozen":
        return norm.eval()(x)
    count = {"group": math.gcd(groups, norm.num_features), "layer": 1}.get(to, norm.num_features)
    plain = nn.GroupNorm(count, norm.num_features, norm.eps)
    plain.load_state_dict({"weight": norm.weight, "bias": norm.bias})
    result: torch.Tensor = plain(x)
    return result


@pytest.mark.parametrize("to", TO)
@pytest.mark.parametrize("groups", [32, 3])
def test_each_kind_is_that_norm_with_the_weights_carried_over(to: str, groups: int) -> None:
    net, x = trained(12), torch.randn(4, 12, 8, 8)
    norm: nn.BatchNorm2d = net.blocks[0].norm  # type: ignore[assignment]
    handle = TECHNIQUE.apply({"ConvNet": net}, part_of(to, groups=groups))
    before = norm.running_mean.clone()  # type: ignore[union-attr]
    found = norm(x)
    assert torch.equal(norm.running_mean, before)  # type: ignore[arg-type]
    handle.revert()
    assert type(norm) is nn.BatchNorm2d
    assert torch.equal(found, expected(to, norm, groups, x))
    norm.train()
    assert not torch.equal(norm(x), found)


@pytest.mark.parametrize("to", TO)
def test_it_is_what_a_person_writes_and_is_reverted(to: str) -> None:
    net, batch = trained(), images(8)
    state = {key: value.clone() for key, value in net.state_dict().items()}
    found = []
    for change in (TECHNIQUE.apply, TECHNIQUE.by_hand):
        handle = change({"ConvNet": net}, part_of(to))
        net.zero_grad()
        torch.manual_seed(1)
        squared(net, batch).backward()
        found.append([p.grad for p in net.parameters()])
        assert net.state_dict().keys() == state.keys()
        handle.revert()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # type: ignore[arg-type]
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())
    assert all(type(m).__name__ != "Swapped" and "forward" not in vars(m) for m in net.modules())


@pytest.mark.slow
def test_parts_of_the_batch_are_planned_with_it_and_certified_as_asked() -> None:
    torch.manual_seed(0)
    step = train_step(ConvNet(8, 4), images(16), "SGD")
    fitting = Fitting(
        step,
        Request(steps=2),
        lambda _: None,
        Terms(exclude=("recompute", "replay", "overwrite"), allow="semantic=replace_norm"),
    )
    fit = fitting.nearest(memory_limit("50%"))
    assert fit.missed is None
    assert [one.name for one in fit.plan.techniques][:2] == ["replace_norm", "micro_batch"]
    assert fit.plan.techniques[0].options == {"to": "group"}
    assert fit.certificate is not None
    assert fit.certificate.verdict == "AS ASKED", fit.certificate.reason
    assert "must be fine-tuned" in fit.certificate.reason


def test_parts_of_the_batch_name_it_where_they_are_refused() -> None:
    net = ConvNet(8, 1)
    part = Technique(name="micro_batch", where=("ConvNet",), options={"parts": 2})
    handle = technique("micro_batch").apply({"ConvNet": net}, part)
    with pytest.raises(ApplyFailed, match="semantic=replace_norm"):
        net(images(8))
    handle.revert()


def test_what_cannot_be_is_refused_and_the_model_is_as_it_was() -> None:
    net = ConvNet(8, 1)
    with pytest.raises(ApplyFailed, match="no running statistics yet"):
        TECHNIQUE.apply({"ConvNet": net}, part_of("frozen"))
    with pytest.raises(ApplyFailed, match="one of group, layer"):
        TECHNIQUE.apply({"ConvNet": net}, part_of("batch"))
    with pytest.raises(ApplyFailed, match="has no BatchNorm"):
        TECHNIQUE.apply({"Linear": nn.Linear(2, 2)}, part_of("group", "Linear"))
    flat = nn.Sequential(nn.BatchNorm1d(8))
    handle = TECHNIQUE.apply({"Sequential": flat}, part_of("instance", "Sequential"))
    with pytest.raises(ApplyFailed, match="a single number"):
        flat(torch.randn(4, 8))
    handle.revert()
    assert all(type(m).__module__.startswith(("torch.nn", "steps")) for m in net.modules())
