"""BatchNorm and what follows it, run in parts of the channels: planned to the byte, equal bit for bit."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import draws
import torchtrim
from steps import train_step
from torchtrim.errors import ApplyFailed
from torchtrim.records.budget import memory_limit
from torchtrim.records.plan import Technique
from torchtrim.records.terms import Terms
from torchtrim.records.trial import Request
from torchtrim.step.from_profile import step_of
from torchtrim.step.simulate import simulate
from torchtrim.step.step import Step
from torchtrim.techniques.split_channels import running
from torchtrim.techniques.split_channels.technique import TECHNIQUE
from torchtrim.workflows.optimize.fitting import Fitting

FOLLOWING: dict[str, tuple[nn.Module, ...]] = {
    "nothing": (),
    "relu": (nn.ReLU(),),
    "relu in place": (nn.ReLU(inplace=True),),
    "pooling": (nn.LeakyReLU(0.2), nn.MaxPool2d(2)),
    "upsampling": (nn.LeakyReLU(0.2, inplace=True), nn.Upsample(scale_factor=2)),
    "average": (nn.ReLU6(), nn.AvgPool2d(2)),
}


def part_of(*where: str, parts: Any = 4, overwrites: Any = True) -> Technique:
    options = {"overwrites": overwrites, "parts": parts}
    return Technique(name="split_channels", where=where, options=options, equivalence="BITWISE")


def network(following: str = "pooling", channels: int = 16, **norm: Any) -> nn.Sequential:
    """A convolution and a norm, and what follows."""
    torch.manual_seed(0)
    last = copy.deepcopy(FOLLOWING[following])
    first = nn.Conv2d(3, channels, 3, padding=1, bias=False)
    return nn.Sequential(first, nn.BatchNorm2d(channels, **norm), *last)


def place_in(net: nn.Sequential) -> str:
    return "Sequential.1" if len(net) == 2 else f"Sequential[1:{len(net)}]"


class First(nn.Module):
    """The first of several results."""

    def forward(self, several: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return several[0].relu()


class Block(nn.Module):
    """Two norms that are called by name; what the first is given is looked at again, if asked for."""

    def __init__(self, again: str = "") -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.norm, self.other = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.again, self.kept = again, torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.a(x)
        if self.again == "result":
            made = torch.relu(made)
        normed = torch.relu(self.norm(made))
        if self.again == "name":
            self.kept = made
        if self.again == "saved":
            normed = normed * made
        if self.again == "added":
            normed = normed + made
        if self.again == "twice":
            normed = normed + torch.relu(self.norm(made))
        return torch.relu(self.other(self.b(normed)))


GRADIENTS = ("in order", "channels last", "turned", "spread", "one number")


def gradient_of(made: torch.Tensor, kind: str) -> torch.Tensor:
    """What comes to a result in backward: all of it drawn, or spread from one number a channel or in all."""
    drawn = torch.linspace(-1, 1, made.numel(), dtype=torch.float64).to(made.dtype).view(made.shape)
    if kind == "spread":
        return drawn[(..., *(slice(1),) * (made.dim() - 2))].expand(made.shape)
    if kind == "one number":
        return drawn.flatten()[0].expand(made.shape)
    if kind == "turned":
        return drawn.transpose(-1, -2).contiguous().transpose(-1, -2)
    last = kind == "channels last" and made.dim() == 4
    return drawn.contiguous(memory_format=torch.channels_last) if last else drawn


def results(net: nn.Module, batch: torch.Tensor, kind: str) -> list[torch.Tensor]:
    """Output, all gradients, all buffers."""
    net.zero_grad()
    given = batch.clone(memory_format=torch.preserve_format).requires_grad_()
    made = net(given)
    made.backward(gradient_of(made, kind))
    assert given.grad is not None
    of_weights = [one.grad for one in net.parameters() if one.grad is not None]
    return [made.detach(), given.grad, *of_weights, *(one.clone() for one in net.buffers())]


def assert_same(
    net: nn.Module, other: nn.Module, batch: torch.Tensor, kind: str = "in order"
) -> None:
    for _ in range(2):
        pairs = zip(results(net, batch, kind), results(other, batch, kind), strict=True)
        for one, two in pairs:
            assert torch.equal(one, two)
            assert one.stride() == two.stride()


LAYOUTS = (torch.contiguous_format, torch.channels_last)
NORMS: tuple[dict[str, Any], ...] = (
    {},
    {"affine": False},
    {"momentum": None},
    {"track_running_stats": False},
)
CASES = list(
    itertools.product(
        (torch.float32, torch.bfloat16, torch.float64),
        LAYOUTS,
        (5, 16, 33, 40, 65, 96),
        NORMS,
        (2, 3, 8),
        (1, 4),
        FOLLOWING,
        GRADIENTS,
        ((13, 10), (2, 2), (1, 2), (1, 1)),
    )
)
"""Pooling leaves (2, 2) one place, which lies in every order."""


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_every_bit_is_the_same() -> None:
    chosen = random.Random(draws.seed()).sample(CASES, draws.count(960))
    for dtype, layout, channels, norm, parts, count, following, kind, places in chosen:
        if following in ("pooling", "average") and min(places) < 2:
            continue
        torch.set_num_threads(count)
        net = network(following, channels, **norm).to(dtype).to(memory_format=layout)
        other = copy.deepcopy(net)
        TECHNIQUE.apply({"Sequential": other}, part_of(place_in(other), parts=parts))
        batch = torch.randn(3, 3, *places).to(dtype).contiguous(memory_format=layout)
        assert_same(net, other, batch, kind)


@pytest.mark.parametrize("dimensions", [1, 3])
def test_one_and_three_dimensions_are_the_same(dimensions: int) -> None:
    convolution, norm = (
        (nn.Conv1d, nn.BatchNorm1d) if dimensions == 1 else (nn.Conv3d, nn.BatchNorm3d)
    )
    net = nn.Sequential(convolution(2, 6, 3), norm(6), nn.ReLU())
    other = copy.deepcopy(net)
    TECHNIQUE.apply({"Sequential": other}, part_of("Sequential[1:3]"))
    assert_same(net, other, torch.randn(4, 2, *(7,) * dimensions))


def test_frozen_weights_and_autocast_are_the_same() -> None:
    net = network("upsampling")
    net[1].weight.requires_grad_(False)
    other = copy.deepcopy(net)
    TECHNIQUE.apply({"Sequential": other}, part_of(place_in(other)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(net, other, torch.randn(2, 3, 8, 8))


def test_a_result_of_another_layout_than_its_gradient_is_the_same() -> None:
    """A last part of one channel would lie in both, and be summed otherwise."""
    for layout, kind in itertools.product(LAYOUTS, GRADIENTS):
        net = nn.Sequential(nn.Identity(), nn.BatchNorm2d(33), nn.ReLU())
        other = copy.deepcopy(net)
        TECHNIQUE.apply({"Sequential": other}, part_of("Sequential[1:3]", overwrites=False))
        batch = torch.randn(3, 33, 7, 5).contiguous(memory_format=layout)
        assert_same(net, other, batch, kind)


def test_what_a_person_made_is_not_overwritten() -> None:
    net = nn.Sequential(nn.BatchNorm2d(4))
    TECHNIQUE.apply({"Sequential": net}, part_of("Sequential.0"))
    batch = torch.randn(2, 4, 3, 3, requires_grad=True)
    before = batch.detach().clone()
    net(batch).square().sum().backward()
    assert torch.equal(batch.detach(), before)


def test_evaluation_and_calls_without_gradients_run_as_they_are() -> None:
    net = network("relu")
    other = copy.deepcopy(net)
    TECHNIQUE.apply({"Sequential": other}, part_of(place_in(other)))
    batch = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(net(batch), other(batch))
    assert_same(net.eval(), other.eval(), batch)


def test_a_second_derivative_is_refused() -> None:
    net, given = network(), torch.randn(2, 3, 8, 8, requires_grad=True)
    TECHNIQUE.apply({"Sequential": net}, part_of(place_in(net)))
    with pytest.raises(ApplyFailed, match="split_channels cannot be differentiated twice"):
        torch.autograd.grad(net(given).sum(), given, create_graph=True)


@pytest.mark.parametrize("following", ["nothing", "relu"])
def test_a_replica_computes_with_its_own_weights(following: str) -> None:
    net = network(following)
    TECHNIQUE.apply({"Sequential": net}, part_of(place_in(net)))
    replica = net._replicate_for_data_parallel()
    norm = net[1]._replicate_for_data_parallel()
    norm.weight, norm.bias = torch.zeros(16), torch.ones(16)
    replica._modules["1"] = norm
    assert (replica(torch.randn(2, 3, 8, 8)) == 1).all()


def test_it_is_reverted() -> None:
    net = network("pooling")
    before = [type(one) for one in net.modules()], list(net.state_dict())
    for where in ("Sequential.1", "Sequential[1:4]"):
        TECHNIQUE.apply({"Sequential": net}, part_of(where)).revert()
        assert ([type(one) for one in net.modules()], list(net.state_dict())) == before
    assert_same(net, copy.deepcopy(net), torch.randn(2, 3, 8, 8))


def recorded(step: torchtrim.TrainStep) -> tuple[Step, int]:
    trial = Fitting(step, Request(steps=1), lambda _: None).observe()
    assert trial.profile is not None
    return step_of(trial.profile, trial.seconds), trial.peak_bytes


NETWORKS = {
    "range": lambda: nn.Sequential(*network("pooling"), nn.Conv2d(16, 4, 3)),
    "upsampling": lambda: nn.Sequential(*network("upsampling"), nn.Conv2d(16, 4, 3)),
    "alone": lambda: nn.Sequential(*network("nothing"), nn.AdaptiveAvgPool2d(1)),
    "channels last": lambda: nn.Sequential(*network("pooling", 96), nn.Conv2d(96, 4, 3)).to(
        memory_format=torch.channels_last
    ),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_the_peak_falls_to_what_was_said(kind: str) -> None:
    net = NETWORKS[kind]()
    layout = torch.channels_last if kind == "channels last" else torch.contiguous_format
    step = train_step(net, torch.randn(4, 3, 32, 32).contiguous(memory_format=layout), "SGD")
    whole, before = recorded(step)
    largest: dict[int, Any] = {}
    for one in TECHNIQUE.options(whole):
        known = largest.get(one.spans[0].first)
        if known is None or one.spans[0].last > known.spans[0].last:
            largest[one.spans[0].first] = one
    edits = [edit for one in largest.values() if (edit := TECHNIQUE.edits(whole, one)) is not None]
    saved = simulate(whole).peak_bytes - simulate(whole, edits).peak_bytes
    assert saved > 0.05 * before
    where = [one.where for one in largest.values()]
    TECHNIQUE.apply({"Sequential": net}, part_of(*where, parts=8))
    _, after = recorded(step)
    assert after == pytest.approx(before - saved, rel=0.01)


def test_few_channels_that_are_last_are_not_planned() -> None:
    """A processor takes them all at a time, so that nothing would be saved."""
    net = NETWORKS["range"]().to(memory_format=torch.channels_last)
    batch = torch.randn(4, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    step, _ = recorded(train_step(net, batch, "SGD"))
    assert not any(TECHNIQUE.edits(step, one) for one in TECHNIQUE.options(step))


@pytest.mark.parametrize("again", ["", "name", "saved", "added", "result", "twice"])
def test_only_an_input_that_nobody_looks_at_again_is_overwritten(again: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), Block(again))
    step, _ = recorded(train_step(net, torch.randn(4, 3, 16, 16), "SGD"))
    found = {one.where: dict(one.settings)["overwrites"] for one in TECHNIQUE.options(step)}
    expected = {"Sequential.1.other": True}
    if again in ("", "saved", "added"):
        expected["Sequential.1.norm"] = True
    assert found == expected


def test_what_is_saved_for_another_backward_is_not_overwritten_in_silence() -> None:
    net = Block("result")
    TECHNIQUE.apply({"Block": net}, part_of("Block.norm"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        net(torch.randn(2, 8, 8, 8)).sum().backward()
    net, batch = Block(), torch.randn(2, 8, 8, 8)
    twin = copy.deepcopy(net)
    TECHNIQUE.apply({"Block": net}, part_of("Block.norm"))
    for one in (net, twin):
        loss = one(batch).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for one, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_modules_with_hooks_and_others_of_all_channels_are_left_out() -> None:
    hooked = network("relu")
    hooked[2].register_forward_hook(lambda *_: None)
    step, _ = recorded(train_step(hooked, torch.randn(2, 3, 16, 16), "SGD"))
    assert [one.where for one in TECHNIQUE.options(step)] == ["Sequential.1"]
    several = nn.Sequential(*network("relu"), nn.MaxPool2d(2, return_indices=True), First())
    step, _ = recorded(train_step(several, torch.randn(2, 3, 16, 16), "SGD"))
    assert {one.where for one in TECHNIQUE.options(step)} == {"Sequential.1", "Sequential[1:3]"}
    mixing = nn.Sequential(*network("relu"), nn.Softmax(1), nn.Flatten())
    step, _ = recorded(train_step(mixing, torch.randn(2, 3, 16, 16), "SGD"))
    assert {one.where for one in TECHNIQUE.options(step)} == {"Sequential.1", "Sequential[1:3]"}


def test_it_is_chosen_and_a_fault_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(*network("pooling"), nn.Conv2d(16, 4, 3))
    step: torchtrim.TrainStep = train_step(net, torch.randn(4, 3, 32, 32), "SGD")
    others = ("recompute", "replay", "overwrite", "optimizer_in_backward", "plain_optimizer")
    fitting = Fitting(step, Request(steps=2), lambda _: None, Terms(exclude=others))
    fit = fitting.nearest(memory_limit("70%"))
    assert fit.missed is None
    assert fit.certificate is not None
    assert {one.name for one in fit.plan.techniques} == {"split_channels"}
    assert fit.certificate.verdict == "BITWISE", fit.certificate.reason
    monkeypatch.setattr(running, "_counted", lambda norm: ((None, None), 0.0))
    assert fitting.verify(fit.original, fit.plan).verdict == "NOT EQUAL"


def test_what_cannot_run_in_parts_is_refused() -> None:
    for options in ({"parts": 1}, {"parts": True}, {"overwrites": 1}):
        with pytest.raises(ApplyFailed, match="`parts`, 2 or more"):
            TECHNIQUE.apply({}, part_of("Sequential", **options))
    net = nn.Sequential(nn.ReLU(), nn.BatchNorm2d(4))
    for where in ("Sequential.0", "Sequential[0:2]"):
        with pytest.raises(ApplyFailed, match="does not begin with a BatchNorm"):
            TECHNIQUE.apply({"Sequential": net}, part_of(where))
    for register in (
        net[1].register_forward_pre_hook,
        net[1].register_forward_hook,
        net[1].register_full_backward_pre_hook,
        net[1].register_full_backward_hook,
    ):
        hook = register(lambda *_: None)
        with pytest.raises(ApplyFailed, match="has hooks"):
            TECHNIQUE.apply({"Sequential": net}, part_of("Sequential.1"))
        hook.remove()
