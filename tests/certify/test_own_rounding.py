"""A model that enlarges rounding is told from a bug: behind a norm its loss hardly depends on anything."""

from __future__ import annotations

import pytest
import torch

import torchtrim
from steps import encoder, squared, train_step
from torchtrim.planner.plans import build_plan
from torchtrim.records.certificate import Certificate
from torchtrim.records.plan import Prediction, Technique
from torchtrim.records.terms import Terms
from torchtrim.records.trial import Request
from torchtrim.runner.settings import prepare
from torchtrim.techniques.micro_batch import running as parted
from torchtrim.workflows.optimize.fitting import Fitting

PLACE = "TransformerEncoder.layers.0.self_attn"


def certified() -> Certificate:
    """Of an encoder whose last norm makes its squares nearly a constant, a part of it in micro-batches."""
    torch.manual_seed(0)
    step = train_step(encoder(16, 2), torch.randn(4, 24, 16), "SGD")
    fitting = Fitting(step, Request(steps=2), lambda _: None, Terms(allow="ROUNDING"))
    where = Technique(name="micro_batch", where=(PLACE,), options={"parts": 4})
    plan = build_plan(
        "",
        fingerprint={},
        techniques=(where,),
        predicted=Prediction(peak_bytes=0, step_seconds=0.0),
        budget_bytes=1,
    )
    return fitting.verify(fitting.observe(), plan)


def test_enlarged_rounding_is_no_bug() -> None:
    found = certified()
    assert found.verdict == "ROUNDING"
    assert "would have seen" in found.reason
    assert found.sees["loss"] < 1e-9


@pytest.mark.slow
def test_an_error_a_little_larger_is(monkeypatch: pytest.MonkeyPatch) -> None:
    own = parted._run_backward

    def wrong(pairs: list[tuple[torch.autograd.graph.GradientEdge, torch.Tensor]]) -> None:
        own([(edge, grad * (1 + 1e-8)) for edge, grad in pairs])

    monkeypatch.setattr(parted, "_run_backward", wrong)
    found = certified()
    assert found.verdict == "NOT EQUAL"
    assert "float64" in found.reason


def test_parameters_are_moved_by_one_rounding_and_put_back() -> None:
    net = torch.nn.Linear(3, 3)
    before = net.weight.detach().clone()
    prepare(net, Request(nudged=1))
    gap = (net.weight.detach() - before).abs() / before.abs()
    assert 0 < float(gap.max()) <= 2 * torch.finfo(torch.float32).eps
    step = torchtrim.TrainStep(
        net, squared, torch.optim.SGD(net.parameters(), 0.1), torch.randn(2, 3)
    )
    state = net.weight.detach().clone()
    Fitting(step, Request(steps=1, nudged=1), lambda _: None).observe()
    assert torch.equal(net.weight.detach(), state)


def test_a_long_sum_in_another_order_is_rounding() -> None:
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(8, 8, 3, padding=1)
    step = train_step(conv, torch.rand(8, 8, 96, 96), "SGD")
    fitting = Fitting(step, Request(steps=2), lambda _: None, Terms(allow="ROUNDING"))
    where = Technique(name="micro_batch", where=("Conv2d",), options={"parts": 2})
    plan = build_plan(
        "",
        fingerprint={},
        techniques=(where,),
        predicted=Prediction(peak_bytes=0, step_seconds=0.0),
        budget_bytes=1,
    )
    assert fitting.verify(fitting.observe(), plan).verdict == "ROUNDING"


class Rounded(torch.nn.Linear):
    """A layer whose results have bfloat16's digits, as kernels of float32 may; in float64 they have all."""

    rounds = flips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if self.flips:
            x, weight = x.flip(-1), weight.flip(-1)
        found = torch.nn.functional.linear(x, weight, self.bias)
        return found.bfloat16().float() if self.rounds and x.dtype is torch.float32 else found


def rounded(*, rounds: bool, flips: bool = False) -> torchtrim.TrainStep:
    torch.manual_seed(0)
    layer = Rounded(64, 64)
    # Not attributes of an instance, which are compared.
    layer.__class__ = type("Rounded", (Rounded,), {"rounds": rounds, "flips": flips})
    return train_step(layer, torch.randn(16, 64), "SGD")


def test_fewer_digits_are_no_rounding_of_float32() -> None:
    found = torchtrim.verify(rounded(rounds=False), rounded(rounds=True), steps=1)
    assert found.verdict == "UNDECIDED"
    assert "fewer digits" in found.reason


def test_fewer_digits_on_both_sides_are() -> None:
    found = torchtrim.verify(rounded(rounds=True), rounded(rounds=True, flips=True), steps=1)
    assert found.verdict == "ROUNDING"
    assert found.largest_difference is not None
    assert found.largest_difference > 1e-4


class Half(torch.nn.Linear):
    """A layer with weights of bfloat16, to which its input is cast."""

    parts = wrong = rounds = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half, weight, by = x.bfloat16(), self.weight, 16
        linear = torch.nn.functional.linear
        if self.parts:
            found = linear(half[:, by:], weight[:, by:]) + linear(
                half[:, :by], weight[:, :by], self.bias
            )
        else:
            found = linear(half, weight, self.bias)
        found = torch.tanh(found.to(x.dtype) + x)
        if self.rounds:
            found = found.bfloat16().to(x.dtype)
        return found * 1.01 if self.wrong else found


def halved(**how: bool) -> torchtrim.TrainStep:
    torch.manual_seed(0)
    layer = Half(64, 64, dtype=torch.bfloat16)
    layer.__class__ = type("Half", (Half,), how)
    return train_step(layer, torch.randn(16, 64), "SGD")


def test_layers_in_half_precision_are_compared_in_float64() -> None:
    found = torchtrim.verify(halved(), halved(parts=True), steps=1)
    assert found.verdict == "ROUNDING", found.reason
    assert torchtrim.verify(halved(), halved(wrong=True), steps=1).verdict == "NOT EQUAL"
    assert torchtrim.verify(halved(), halved(rounds=True), steps=1).verdict == "NOT EQUAL"


def test_what_has_no_float64_is_undecided_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Rounded.forward

    def narrow(layer: Rounded, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float64:
            raise RuntimeError("no kernel for Double")
        return own(layer, x)

    monkeypatch.setattr(Rounded, "forward", narrow)
    found = torchtrim.verify(rounded(rounds=False), rounded(rounds=False, flips=True), steps=1)
    assert found.verdict == "UNDECIDED"
    assert "no kernel for Double" in found.reason
