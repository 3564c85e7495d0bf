"""Verdicts: equal plans are BITWISE, and every planted fault is caught."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchtrim
from steps import ConvNet, encoder, fitting, images, squared, train_step
from torchtrim import TrainStep
from torchtrim.certify.compare import coverage_of
from torchtrim.errors import ApplyFailed
from torchtrim.records.certificate import Certificate
from torchtrim.records.plan import Plan, Prediction, Technique
from torchtrim.records.trial import Request
from torchtrim.runner.trials import run_trial
from torchtrim.techniques.recompute import rerun
from torchtrim.workflows.optimize.fitting import Fitting


def plan_for(*where: str) -> Plan:
    return Plan(
        torchtrim="0",
        script="",
        fingerprint={},
        budget_bytes=1,
        techniques=(Technique(name="recompute", where=where),),
        predicted=Prediction(peak_bytes=0, step_seconds=0.0),
    )


BLOCKS = tuple(f"ConvNet.blocks.{i}" for i in (1, 3))


def certificate(step: TrainStep, *where: str) -> Certificate:
    found = fitting(step, steps=3)
    return found.verify(found.observe(), plan_for(*where))


@pytest.fixture
def step() -> TrainStep:
    torch.manual_seed(0)
    return train_step(ConvNet(4, 4), images(12, 4))


def test_recompute_is_bitwise(step: TrainStep) -> None:
    given = certificate(step, *BLOCKS)
    assert given.verdict == "BITWISE"
    assert given.largest_difference == given.noise == 0.0
    assert given.first_difference is None
    text = " ".join(given.compared)
    for quantity in (
        "loss",
        "output",
        "gradient",
        "parameter",
        "optimizer state",
        "buffer",
        "random",
    ):
        assert quantity in text
    assert given.steps == 5


def test_where_every_bit_agrees_two_runs_are_enough(step: TrainStep) -> None:
    said: list[str] = []
    found = Fitting(step, Request(steps=2), said.append)
    verdict = found.verify(found.observe(), plan_for(*BLOCKS)).verdict
    assert (verdict, {text.partition(":")[0] for text in said}) == (
        "BITWISE",
        {"original", "planned"},
    )


def no_buffers() -> tuple[Any, Any]:
    return contextlib.nullcontext(), contextlib.nullcontext()


def forgets_random_numbers(buffers: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=buffers.contexts
    )


def updates_norm_twice(buffers: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False, context_fn=no_buffers)


def off_by_a_thousandth(buffers: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs) + 1e-3


def scales_gradient(buffers: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    output = function(*args, **kwargs)
    output.register_hook(lambda gradient: gradient * 1.001)
    return output


def loses_buffer(buffers: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    before = {key: tensor.clone() for key, tensor in buffers._state.tensors()}
    output = function(*args, **kwargs)
    for key, value in before.items():
        getattr(buffers._state.modules[key.module], key.table)[key.name] = value
    return output


@pytest.mark.parametrize(
    ("fault", "quantity"),
    [
        (forgets_random_numbers, "gradient"),
        (updates_norm_twice, "buffer"),
        (off_by_a_thousandth, "output"),
        (scales_gradient, "gradient"),
        (loses_buffer, "buffer"),
    ],
)
def test_faults_are_caught(
    step: TrainStep, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Any], quantity: str
) -> None:
    monkeypatch.setattr(rerun, "run_again", fault)
    given = certificate(step, *BLOCKS)
    assert given.verdict == "NOT EQUAL"
    assert given.first_difference is not None
    assert given.first_difference.op.startswith(quantity)
    assert given.largest_difference is None or given.largest_difference > 0


def test_an_extra_random_number_is_caught(step: TrainStep, monkeypatch: pytest.MonkeyPatch) -> None:
    def draws(buffers: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        torch.rand(1)
        return output

    monkeypatch.setattr(rerun, "run_again", draws)
    assert certificate(step, BLOCKS[1]).verdict == "NOT EQUAL"


def test_rounding_is_told_from_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def thirds(buffers: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        return output / 3 + output / 3 + output / 3

    torch.manual_seed(0)
    net = encoder(16, 2)
    monkeypatch.setattr(rerun, "run_again", thirds)
    given = certificate(
        train_step(net, torch.randn(4, 8, 16), "SGD"), "TransformerEncoder.layers.0"
    )
    assert given.verdict == "ROUNDING"
    assert given.largest_difference is not None
    assert 0 < given.largest_difference < 1e-2


def test_a_small_bug_is_no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    def nearly(buffers: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) * (1 + 1e-6)

    torch.manual_seed(0)
    monkeypatch.setattr(rerun, "run_again", nearly)
    step = train_step(encoder(16, 2), torch.randn(4, 8, 16), "SGD")
    given = certificate(step, "TransformerEncoder.layers.0")
    assert given.verdict == "NOT EQUAL"
    assert "float64" in given.reason


class Noisy(nn.Module):
    """A layer whose noise no seed rules."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) + int.from_bytes(os.urandom(1)) * 1e-4)


def test_an_original_unlike_itself_is_undecided() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Noisy(), Noisy())
    step = TrainStep(model, squared, torch.optim.SGD(model.parameters(), 0.1), torch.randn(4, 6))
    given = certificate(step, "Sequential.0")
    assert given.noise is not None
    assert given.noise > 0
    assert given.verdict in ("UNDECIDED", "NOT EQUAL")
    assert "itself" in given.reason


def test_verifying_leaves_the_workload_alone(step: TrainStep) -> None:
    model = step.model
    state = {k: v.clone() for k, v in model.state_dict().items()}
    random = torch.get_rng_state()
    certificate(step, *BLOCKS)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not step.optimizers[0].state
    assert all(p.grad is None for p in model.parameters())
    assert all(p.dtype is torch.float32 for p in model.parameters())


def test_a_generator_of_random_numbers_has_no_rounding(
    step: TrainStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draws(buffers: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        random.random()
        return function(*args, **kwargs)

    monkeypatch.setattr(rerun, "run_again", draws)
    given = certificate(step, BLOCKS[1])
    assert given.verdict == "NOT EQUAL"
    assert "random state:python" in given.reason


def test_a_plan_with_a_fingerprint_is_judged_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    def thirds(buffers: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        return output / 3 + output / 3 + output / 3

    torch.manual_seed(0)
    step = train_step(encoder(16, 2), torch.randn(4, 8, 16), "SGD")
    monkeypatch.setattr(rerun, "run_again", thirds)
    found = fitting(step, steps=3)
    original = found.observe()
    plan = plan_for("TransformerEncoder.layers.0")
    plan = msgspec.structs.replace(plan, fingerprint=original.fingerprint)
    assert found.verify(original, plan).verdict == "ROUNDING"


class Growing(nn.Module):
    """A layer that does something else at every second call, as an iterator tells it, which has no copy. The
    source does not show who draws from it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.calls = itertools.count()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_odd = eval("next(self.calls)") % 2
        return torch.tanh(torch.sin(self.linear(x))) if is_odd else self.linear(x)


def test_a_block_that_is_another_when_it_runs_again_is_refused() -> None:
    torch.manual_seed(0)
    step = train_step(nn.Sequential(Growing(), Growing()), torch.randn(4, 6), "SGD")
    with pytest.raises(ApplyFailed, match="runs again in backward"):
        certificate(step, "Sequential.0")


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.net(x) * ids


def test_a_trial_says_its_shapes_types_modes_and_steps(tmp_path: Path) -> None:
    model = Gate()
    few, many = ((torch.ones(n, 5, 3), torch.ones((), dtype=torch.int64)) for n in (2, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torchtrim.TrainStep(
        model, lambda model, batch: model(*batch).sum(), optimizer, few, second_batch=many
    )
    found = coverage_of(run_trial(step, Request(steps=2), tmp_path))
    assert found.inputs == ("Gate: float32[2, 5, 3], int64[]", "Gate: float32[4, 5, 3], int64[]")
    assert found.dtypes == ("float32", "int64")
    assert found.batch_sizes == (2, 4)
    assert found.dimensions == (0, 3)
    assert found.modes == ("training",)
    assert (found.steps, found.device, found.processes) == (4, "cpu", (0,))


def test_a_size_that_differs_within_a_tensor_is_a_star(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    ragged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = TrainStep(model, lambda model, batch: model(batch).values().sum(), optimizer, ragged)
    found = coverage_of(run_trial(step, Request(steps=2), tmp_path))
    assert found.inputs == ("Linear: float32[2, *, 3]",)
    assert (found.batch_sizes, found.dimensions) == ((2,), (3,))
