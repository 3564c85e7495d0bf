"""Modules that treat each row by itself, run in parts: planned to the byte, equal up to rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torchtrim
from steps import squared, train_step
from torchtrim.errors import ApplyFailed
from torchtrim.records.budget import memory_limit
from torchtrim.records.plan import Technique
from torchtrim.records.terms import Terms
from torchtrim.records.trial import Request
from torchtrim.step.from_profile import step_of
from torchtrim.step.simulate import simulate
from torchtrim.techniques.split_matmul import running
from torchtrim.techniques.split_matmul.technique import TECHNIQUE
from torchtrim.workflows.optimize.fitting import Fitting


class Gated(nn.Module):
    """The MLP of Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention, and an MLP that is to be split."""

    def __init__(self, width: int, mlp: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.mlp(self.norm(x))


def plain(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


MLPS = {"plain": plain, "gated": Gated}


def network(kind: str = "plain", width: int = 32, blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, MLPS[kind](width)) for _ in range(blocks)))


def part_of(*where: str, parts: Any = 4) -> Technique:
    options = {"parts": parts}
    return Technique(name="split_matmul", where=where, options=options, equivalence="ROUNDING")


def gradients(net: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    net.zero_grad()
    given = batch.clone().requires_grad_()
    squared(net, given).backward()
    assert given.grad is not None
    return [given.grad, *(p.grad for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize("kind", MLPS)
def test_the_peak_falls_to_what_was_said(kind: str) -> None:
    net = network(kind)
    step = train_step(net, torch.randn(2, 128, 32), "SGD")
    before = Fitting(step, Request(steps=1), lambda _: None).observe()
    assert before.profile is not None
    whole = step_of(before.profile, before.seconds)
    options = TECHNIQUE.options(whole)
    assert [one.where for one in options] == ["Sequential.0.mlp", "Sequential.1.mlp"]
    edits = [edit for one in options if (edit := TECHNIQUE.edits(whole, one)) is not None]
    saved = simulate(whole).peak_bytes - simulate(whole, edits).peak_bytes
    handle = TECHNIQUE.apply({"Sequential": net}, part_of(*(one.where for one in options), parts=8))
    after = Fitting(step, Request(steps=1), lambda _: None).observe()
    handle.revert()
    assert after.peak_bytes == pytest.approx(before.peak_bytes - saved, rel=0.01)
    assert after.peak_bytes < 0.75 * before.peak_bytes


@pytest.mark.parametrize("kind", MLPS)
@pytest.mark.parametrize("shape", [(2, 24, 32), (1, 50, 32)])
def test_gradients_are_equal_in_double_precision_and_it_is_reverted(
    kind: str, shape: tuple[int, ...]
) -> None:
    net, batch = network(kind).double(), torch.randn(shape, dtype=torch.float64)
    whole = gradients(net, batch)
    where = [f"Sequential.{number}.mlp" for number in range(len(net))]
    handle = TECHNIQUE.apply({"Sequential": net}, part_of(*where, parts=7))
    for one, other in zip(gradients(net, batch), whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    handle.revert()
    assert all(
        torch.equal(one, other) for one, other in zip(gradients(net, batch), whole, strict=True)
    )
    assert all(type(block.mlp) is type(MLPS[kind](2)) for block in net)


@dataclasses.dataclass
class Given:
    x: torch.Tensor
    scale: float = 1.0


class Rows(TorchDispatchMode):
    """Note the rows of each product with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.addmm.default:
            self.found.add(len(args[1]))
        return func(*args, **(kwargs or {}))


class Taking(nn.Module):
    """An MLP whose input is not its only argument, or within one."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, given: Any = None, mask: None = None, *, x: Any = None) -> torch.Tensor:
        found = given.x if isinstance(given, Given) else given if x is None else x
        return self.mlp(found if isinstance(found, torch.Tensor) else next(found))


CALLS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "dataclass": lambda net, x: net(Given(x)),
    "keyword": lambda net, x: net(x=x),
    "beside None": lambda net, x: net(x, None),
}


@pytest.mark.parametrize("how", CALLS)
def test_an_input_within_the_arguments_runs_in_parts(how: str) -> None:
    torch.manual_seed(0)
    net, x = Taking(plain(32)).double(), torch.randn(64, 32, dtype=torch.float64)
    CALLS[how](net, x).sum().backward()
    whole = [p.grad for p in net.parameters()]
    net.zero_grad()
    TECHNIQUE.apply({"Taking": net}, part_of("Taking", parts=4))
    with Rows() as rows:
        CALLS[how](net, x).sum().backward()
    assert rows.found == {16}
    for parameter, expected in zip(net.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-12, atol=1e-14)


class Noting(nn.Module):
    """An MLP that writes to its second argument, or reads from it."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = plain(8)

    def forward(self, x: torch.Tensor, beside: Any) -> torch.Tensor:
        if isinstance(beside, dict):
            beside["calls"] = beside.get("calls", 0) + 1
        elif isinstance(beside, list):
            beside.append(1)
        else:
            x = x * next(beside)
        return self.mlp(x)


@pytest.mark.parametrize("make", [dict, list, lambda: iter([2.0, 3.0, 4.0, 5.0])])
def test_arguments_that_a_call_changes_are_changed_once(make: Callable[[], Any]) -> None:
    net, x = Noting(), torch.randn(16, 8)
    as_it_is, planned = make(), make()
    expected = net(x, as_it_is)
    TECHNIQUE.apply({"Noting": net}, part_of("Noting"))
    assert torch.equal(net(x, planned), expected)
    assert list(planned) == list(as_it_is)


def test_a_first_call_without_a_tensor_is_refused() -> None:
    net = Taking(plain(32))
    TECHNIQUE.apply({"Taking": net}, part_of("Taking"))
    with pytest.raises(ApplyFailed, match="no tensor among its arguments"):
        net(iter([torch.randn(8, 32)]))


def test_frozen_parameters_and_autocast_are_as_they_were() -> None:
    net, batch = network(), torch.randn(2, 16, 32)
    net[0].mlp[0].weight.requires_grad_(False)
    found = []
    for parts in (0, 4):
        if parts:
            TECHNIQUE.apply({"Sequential": net}, part_of("Sequential.0.mlp"))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(gradients(net, batch))
    assert len(found[0]) == len(found[1])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * float(other.abs().max()))


def test_a_second_derivative_is_refused_and_a_replica_runs_as_it_is() -> None:
    layer = nn.Linear(4, 4)
    TECHNIQUE.apply({"Net": layer}, part_of("Net", parts=2))
    given = torch.randn(6, 4, requires_grad=True)
    with pytest.raises(ApplyFailed, match="split_matmul cannot be differentiated twice"):
        torch.autograd.grad(layer(given).sum(), given, create_graph=True)
    replica = layer._replicate_for_data_parallel()
    replica.weight, replica.bias = (one.detach().requires_grad_() for one in layer.parameters())
    replica(given).sum().backward()
    assert replica.weight.grad is not None


class TwoNames(nn.Module):
    """A layer that the module holds twice, which `functional_call` does not put back as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = plain(8)
        self.up = self.mlp[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)


def test_after_a_functional_call_on_two_names_it_runs_as_it_is() -> None:
    net, batch = TwoNames().double(), torch.randn(6, 8, dtype=torch.float64)
    values = {name: value.detach() for name, value in net.named_parameters()}

    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(net, values, (batch,)).sum()

    torch.func.grad(loss)(values)
    expected = gradients(net, batch)
    handle = TECHNIQUE.apply({"TwoNames": net}, part_of("TwoNames.mlp"))
    found = gradients(net, batch)
    handle.revert()
    assert all(map(torch.equal, found, expected))


def test_without_gradients_it_runs_as_it_is() -> None:
    net, batch = network(), torch.randn(2, 16, 32)
    with torch.no_grad():
        whole = net(batch)
        TECHNIQUE.apply({"Sequential": net}, part_of("Sequential.0.mlp"))
        assert torch.equal(net(batch), whole)


def wide_step() -> torchtrim.TrainStep:
    return train_step(network(), torch.randn(2, 128, 32), "SGD")


@pytest.mark.slow
def test_it_is_chosen_where_rounding_is_allowed_and_a_fault_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = ("recompute", "replay", "micro_batch", "optimizer_in_backward", "plain_optimizer")
    fitting = Fitting(
        wide_step(), Request(steps=2), lambda _: None, Terms(allow="ROUNDING", exclude=others)
    )
    fit = fitting.nearest(memory_limit("75%"))
    assert fit.missed is None
    assert fit.certificate is not None
    assert fit.planned is not None
    assert {one.name for one in fit.plan.techniques} == {"split_matmul"}
    assert fit.certificate.verdict in ("ROUNDING", "BITWISE"), fit.certificate.reason
    assert fit.planned.peak_bytes == pytest.approx(fit.plan.predicted.peak_bytes, rel=0.01)
    monkeypatch.setattr(running, "_add", lambda sums, found: sums.__setitem__(slice(None), found))
    assert fitting.verify(fit.original, fit.plan).verdict == "NOT EQUAL"


class Meeting(nn.Module):
    """An MLP whose rows meet, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.mlp, self.how = plain(8), how
        self.places = nn.Parameter(torch.randn(6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "reentrant":
            return checkpoint(self.mlp, x, use_reentrant=True)
        if self.how == "turned":
            return self.mlp(x.transpose(1, 2).reshape(x.shape))
        if self.how == "mean":
            return self.mlp(x - x.mean(1, keepdim=True))
        if self.how == "places":
            return self.mlp(x + self.places)
        if self.how == "softmax":
            return self.mlp(x).softmax(1)
        return self.mlp(nn.functional.dropout(x, 0.5))


@pytest.mark.parametrize("how", ["turned", "mean", "places", "softmax", "dropout", "reentrant"])
def test_what_lets_rows_meet_or_draws_is_not_split(how: str) -> None:
    net = Meeting(how)
    step = train_step(net, torch.randn(3, 6, 8, requires_grad=how == "reentrant"), "SGD")
    trial = Fitting(step, Request(steps=1), lambda _: None).observe()
    assert trial.profile is not None
    assert {one.where for one in TECHNIQUE.options(step_of(trial.profile, 1.0))} <= {"Meeting.mlp"}


def test_what_cannot_run_in_parts_is_refused() -> None:
    with pytest.raises(ApplyFailed, match="`parts`, 2 or more"):
        TECHNIQUE.apply({}, part_of("Sequential", parts=1))
    for inner, why in (
        (nn.BatchNorm1d(4), "rows interact"),
        (nn.MultiheadAttention(4, 2), "rows interact"),
        (nn.Dropout(0.5), "draws random numbers"),
    ):
        with pytest.raises(ApplyFailed, match=why):
            TECHNIQUE.apply({"Sequential": nn.Sequential(inner)}, part_of("Sequential"))
    hooked = nn.Sequential(nn.Linear(4, 4))
    hooked[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ApplyFailed, match="has hooks"):
        TECHNIQUE.apply({"Sequential": hooked}, part_of("Sequential"))
    summing = nn.Sequential(nn.Flatten(0))
    TECHNIQUE.apply({"Sequential": summing}, part_of("Sequential", parts=2))
    with pytest.raises(ApplyFailed, match="its rows are not independent"):
        summing(torch.ones(4, 3, requires_grad=True))
