from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from capture.loops import Loop, kinds, linear_relu, made_by, named, operators, record, trained
from models import SAMPLES, Sample, train
from torchtrim.capture.build import untested


def test_a_linear_net_with_adam() -> None:
    profile = trained(linear_relu())
    layers = ("Sequential.0.weight", "Sequential.0.bias", "Sequential.2.weight")
    layers += ("Sequential.2.bias",)
    parameters, gradients = named(profile, "parameter"), named(profile, "gradient")
    assert set(parameters) == set(gradients) == set(layers)
    assert parameters["Sequential.0.weight"].bytes == 4 * 8 * 4
    assert all(storage.birth == -1 for storage in parameters.values())
    assert all(storage.birth >= 0 for storage in gradients.values())
    assert set(named(profile, "optimizer_state")) == {
        f"Adam.{number}.{key}" for number in range(4) for key in ("step", "exp_avg", "exp_avg_sq")
    }
    first, second = made_by(profile, "aten::addmm")
    (relu,) = made_by(profile, "aten::relu")
    assert (first.kind, relu.kind, second.kind) == ("temporary", "activation", "temporary")
    assert relu.bytes == 5 * 8 * 4
    assert kinds(made_by(profile, "aten::_log_softmax")) == ["activation"]
    assert kinds(made_by(profile, "aten::threshold_backward", "backward")) == ["temporary"]


def test_states_made_in_the_recorded_step() -> None:
    sample = linear_relu()
    optimizer = torch.optim.Adam(sample.model.parameters())
    profile = record(lambda: train(sample, optimizer), warmup=0)
    states = named(profile, "optimizer_state")
    assert len(states) == 12
    assert all(storage.birth >= 0 for storage in states.values())
    assert all(storage.death == len(profile.operators) for storage in states.values())


def test_batch_norm() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    profile = trained(Sample(model, torch.randn(5, 4), torch.randint(8, (5,))))
    assert set(named(profile, "buffer")) == {
        f"Sequential.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert kinds(made_by(profile, "aten::addmm")) == ["activation"]
    output, mean, deviation = made_by(profile, "aten::native_batch_norm")
    assert output.kind == "temporary"
    assert mean.kind == deviation.kind == "activation"
    assert mean.bytes == deviation.bytes == 8 * 4


def test_the_mask_of_a_dropout_is_an_activation() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5))
    profile = trained(Sample(model, torch.randn(5, 4), torch.randint(8, (5,))))
    assert kinds(made_by(profile, "aten::empty_like")) == ["activation"]
    (product,) = made_by(profile, "aten::mul")
    assert product.kind == "temporary"


def test_a_view_has_the_storage_of_its_base() -> None:
    sample = Sample(nn.Linear(4, 6), torch.randn(5, 4), torch.randint(3, (10,)))
    optimizer = torch.optim.SGD(sample.model.parameters(), 0.1)

    def loop() -> None:
        for _ in range(2):
            hidden = sample.model(sample.inputs).sigmoid()
            halves = hidden.view(10, 3).t()[:, 2:]
            halves.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    profile = record(loop)
    (sigmoid,) = operators(profile, "forward", "aten::sigmoid")
    views = [
        op.outputs[0]
        for name in ("view", "t", "slice")
        for op in operators(profile, "forward", f"aten::{name}.")
    ][-3:]
    assert {view.storage for view in views} >= {sigmoid.outputs[0].storage}
    assert profile.storages[sigmoid.outputs[0].storage].kind == "activation"
    assert (views[-1].shape, views[-1].strides) == ((3, 8), (1, 3))


def test_gradients_that_accumulate_over_micro_batches() -> None:
    sample = linear_relu()
    optimizer = torch.optim.Adam(sample.model.parameters())

    def loop() -> None:
        for _ in range(3):
            for _ in range(2):
                sample.loss().backward()
            optimizer.step()
            optimizer.zero_grad()

    profile = record(loop)
    assert len(operators(profile, "forward", "aten::addmm")) == 4
    assert len(named(profile, "gradient")) == 4
    gradients = [s for s in profile.storages if s.kind == "gradient"]
    assert len(gradients) == 4
    adds = operators(profile, "backward", "aten::add_")
    assert len(adds) == 4
    assert all(profile.storages[op.mutates[0]].kind == "gradient" for op in adds)


def test_gradients_that_are_zeroed_and_kept() -> None:
    sample = linear_relu()
    optimizer = torch.optim.SGD(sample.model.parameters(), 0.1)

    def loop() -> None:
        for _ in range(3):
            sample.loss().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    profile = record(loop)
    gradients = named(profile, "gradient")
    assert len(gradients) == 4
    assert all(s.birth == -1 and s.death == len(profile.operators) for s in gradients.values())
    zeroes = operators(profile, "other", "aten::zero_")
    assert [profile.storages[op.mutates[0]].name for op in zeroes] == list(gradients)


def test_what_is_saved_but_never_read() -> None:
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x.exp())
            return x * 2

        @staticmethod
        def backward(
            ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor
        ) -> torch.Tensor:
            return gradient * 2

    sample = linear_relu()
    optimizer = torch.optim.SGD(sample.model.parameters(), 0.1)

    def loop() -> None:
        for _ in range(2):
            Keeps.apply(sample.model(sample.inputs)).sum().backward()
            optimizer.step()

    profile = record(loop)
    assert kinds(made_by(profile, "aten::exp")) == ["activation"]


def test_what_python_alone_holds_is_temporary() -> None:
    sample = linear_relu()
    optimizer = torch.optim.SGD(sample.model.parameters(), 0.1)

    def loop() -> None:
        for _ in range(2):
            output = sample.model(sample.inputs)
            extra = output.detach().cos()
            output.sum().backward()
            del output, extra
            optimizer.step()

    profile = record(loop)
    first, second = made_by(profile, "aten::addmm")
    (held,) = made_by(profile, "aten::cos")
    backwards = [i for i, op in enumerate(profile.operators) if op.phase == "backward"]
    assert held.death == second.death == backwards[-1] + 1
    assert kinds([first, second, held]) == ["temporary"] * 3


def test_tied_weights_are_one_parameter() -> None:
    profile = trained(SAMPLES["tied"]())
    parameters = named(profile, "parameter")
    assert "TiedLM.embedding.weight" in parameters
    assert "TiedLM.head.weight" not in parameters
    gradients = [s for s in profile.storages if s.name == "TiedLM.embedding.weight"]
    assert kinds(gradients) == ["parameter", "gradient"]


def test_a_batch_from_a_loader_is_input() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(24, 4), torch.randint(3, (24,)))

    def loop() -> None:
        for inputs, targets in DataLoader(data, batch_size=8):
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    profile = record(loop)
    (addmm,) = operators(profile, "forward", "aten::addmm")
    used = profile.storages[addmm.inputs[1].storage]
    assert (used.kind, used.birth, used.bytes) == ("input", -1, 8 * 4 * 4)
    stacked = made_by(profile, "aten::stack", "loader")
    assert kinds(stacked) == ["input", "input"]
    assert [s.bytes for s in stacked] == [8 * 4 * 4, 8 * 8]


def test_what_no_operator_made_is_input() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loop() -> None:
        for _ in range(2):
            output = model(torch.randn(8, 4))
            weights = torch.frombuffer(bytearray(8 * 3 * 4), dtype=torch.float32)
            (output * weights.view(8, 3)).sum().backward()
            optimizer.step()

    profile = record(loop)
    (mul,) = operators(profile, "forward", "aten::mul.")
    assert profile.storages[mul.inputs[1].storage].kind == "input"


def test_a_parameter_outside_all_modules_is_named_after_its_optimizer() -> None:
    model, scale = nn.Linear(4, 3), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), scale], 0.1)

    def loop() -> None:
        for _ in range(2):
            (model(torch.randn(8, 4)) * scale).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    profile = record(loop)
    assert set(named(profile, "parameter")) == {"Linear.weight", "Linear.bias", "SGD.2"}
    assert set(named(profile, "gradient")) == {"Linear.weight", "Linear.bias", "SGD.2"}


def test_a_gradient_that_the_optimizer_frees_inside_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)

    def loop() -> None:
        for _ in range(3):
            model(torch.randn(8, 4)).sum().backward()

    profile = record(loop)
    gradients = [s for s in profile.storages if s.kind == "gradient"]
    backwards = [i for i, op in enumerate(profile.operators) if op.phase == "backward"]
    assert len(gradients) == 4
    assert all(s.death <= backwards[-1] + 3 for s in gradients)
    updates = operators(profile, "optimizer", "aten::")
    assert len(updates) == 4
    assert all(op.forward == -1 for op in updates)


@pytest.mark.parametrize("name", [name for name in SAMPLES if "checkpointed" not in name])
def test_activations_are_what_autograd_saves(name: str) -> None:
    sample, loop, saved = SAMPLES[name](), Loop(), set()
    optimizer = torch.optim.Adam(sample.model.parameters())

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if loop.recording is not None and loop.steps == 1:
            saved.add(loop.recording.recorder.storages.number(tensor))
        return tensor

    with loop.watcher, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        train(sample, optimizer, steps=2)
        profile = loop.finish()
    found = {i for i, s in enumerate(profile.storages) if s.kind == "activation"}
    assert -1 not in saved
    assert found == {i for i in saved if profile.storages[i].birth >= 0}


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.13.1+cu130", "2.12.0a0+git1"])
def test_what_was_tested_needs_no_word(version: str) -> None:
    assert untested(version) is None


@pytest.mark.parametrize(
    ("version", "than"), [("2.10.1", "older"), ("1.13.0", "older"), ("3.0.0", "newer")]
)
def test_another_version_is_said(version: str, than: str) -> None:
    assert f"torch {version} is {than} than the versions torchtrim was tested with" in str(
        untested(version)
    )


def test_a_version_that_is_none_is_older() -> None:
    assert "older" in str(untested("unknown"))
