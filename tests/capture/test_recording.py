from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from capture.loops import Loop, kinds, linear_relu, made_by, named, operators, record, trained
from models import SAMPLES, Sample, train
from torchtrim.capture.allocator import CpuAllocator
from torchtrim.capture.recording import record_call
from torchtrim.emulator import current, emulate
from torchtrim.records.profile import Profile, check

HERE = __file__


def line_of(function: Callable[..., object], text: str) -> int:
    """The line of the function's source that holds the text."""
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden = hidden.tanh()
        return self.second(hidden)


def net_profile() -> Profile:
    return trained(Sample(Net(), torch.randn(5, 4), torch.randint(3, (5,))))


def test_phases_come_in_order() -> None:
    phases = [op.phase for op in net_profile().operators]
    assert list(dict.fromkeys(phases)) == ["forward", "backward", "optimizer"]


def test_module_and_line_of_each() -> None:
    profile = net_profile()
    found = {
        (op.name, profile.module_of(i)): profile.place_of(i)
        for i, op in enumerate(profile.operators)
        if op.phase == "forward"
    }
    tanh = found["aten::tanh.default", "Net"]
    assert tanh is not None
    assert (tanh.path, tanh.function) == (HERE, "Net.forward")
    assert tanh.line == line_of(Net.forward, "tanh")
    linear = found["aten::addmm.default", "Net.first"]
    assert linear is not None
    assert linear.line == line_of(Net.forward, "self.first(x)")
    loss = found["aten::nll_loss_forward.default", ""]
    assert loss is not None
    assert loss.function == "Sample.loss"


@pytest.mark.parametrize("name", ["encoder", "resnet", "lstm", "unet", "tied", "inplace"])
def test_backward_has_the_forward_operators_line_and_module(name: str) -> None:
    profile = trained(SAMPLES[name]())
    backward = operators(profile, "backward")
    own = [op for op in backward if op.forward >= 0]
    without = {op.name for op in backward if op.forward < 0}
    assert without <= {"aten::detach.default", "aten::ones_like.default"}
    assert len(own) > 10
    for op in own:
        forward = profile.operators[op.forward]
        assert forward.phase == "forward"
        assert (op.module, op.place, op.caller) == (
            forward.module,
            forward.place,
            forward.caller,
        )
        assert op.place >= 0


def test_the_forward_operator_is_the_right_one() -> None:
    profile = net_profile()
    (tanh,) = operators(profile, "backward", "aten::tanh_backward")
    assert profile.operators[tanh.forward].name == "aten::tanh.default"
    (softmax,) = operators(profile, "backward", "aten::_log_softmax_backward_data")
    assert profile.operators[softmax.forward].name == "aten::_log_softmax.default"


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_has_the_line_and_module_of_the_forward(reentrant: bool) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.net, x, use_reentrant=reentrant)

    model = Outer()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loop() -> None:
        for _ in range(2):
            model(torch.randn(5, 4, requires_grad=True)).sum().backward()
            optimizer.step()

    profile = record(loop)
    again = operators(profile, "recompute", "aten::tanh")
    assert len(again) == 1
    place = profile.places[again[0].place]
    assert (place.line, place.function) == (line_of(Net.forward, "tanh"), "Net.forward")
    assert profile.modules[again[0].module].path == "Outer.net"
    made = made_by(profile, "aten::tanh", "recompute")
    assert kinds(made) == ["activation"]
    assert len(profile.calls) == 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_of_plain_functions(reentrant: bool) -> None:
    model = nn.Linear(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def block(x: torch.Tensor) -> torch.Tensor:
        return x.tanh().sigmoid().exp()

    def loop() -> None:
        for _ in range(2):
            hidden = model(torch.randn(5, 4))
            checkpoint(block, hidden, use_reentrant=reentrant).sum().backward()
            optimizer.step()

    profile = record(loop)
    names = [op.name for op in operators(profile, "recompute") if op.name != "aten::detach.default"]
    assert names[:2] == ["aten::tanh.default", "aten::sigmoid.default"]
    (tanh,) = operators(profile, "recompute", "aten::tanh")
    assert profile.places[tanh.place].line == line_of(block, "tanh")


def test_the_line_of_a_recomputed_library_module_is_that_of_its_forward() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loop() -> None:
        for _ in range(2):
            loss = checkpoint(model, torch.randn(5, 4), use_reentrant=False).sum()
            loss.backward()
            optimizer.step()

    profile = record(loop)
    for op in operators(profile, "recompute"):
        assert profile.places[op.place].line == line_of(loop, "checkpoint(model")


def test_a_gradient_taken_inside_a_forward_is_backward() -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            energy = self.energy(x).tanh().sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

    model = Force()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loop() -> None:
        for _ in range(2):
            model(torch.randn(5, 3, requires_grad=True)).square().sum().backward()
            optimizer.step()

    profile = record(loop)
    assert not operators(profile, "recompute")
    first, *_ = operators(profile, "backward", "aten::tanh_backward")
    assert profile.modules[first.module].path == "Force"
    assert operators(profile, "forward", "aten::pow")


@pytest.mark.parametrize("create_graph", [False, True])
def test_the_backward_of_a_function_of_the_users_is_backward(create_graph: bool) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        def backward(ctx: torch.autograd.Function, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return gradient * x.mul(2)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loop() -> None:
        for _ in range(2):
            x = torch.randn(5, 4, requires_grad=True)
            energy = Square.apply(model(x)).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=create_graph, retain_graph=True)
            (energy + force.sum()).backward()
            optimizer.step()

    profile = record(loop)
    assert not operators(profile, "recompute")
    first, *_ = operators(profile, "backward", "aten::mul")
    assert profile.operators[first.forward].name.startswith("aten::pow")
    assert profile.places[first.place].line == line_of(Square.forward, "square")


def test_labels() -> None:
    sample = linear_relu()
    optimizer = torch.optim.SGD(sample.model.parameters(), 0.1)

    def loop() -> None:
        for _ in range(2):
            with torch.profiler.record_function("outer"):
                with torch.profiler.record_function("inner"):
                    loss = sample.loss()
                loss = loss * 2
            loss.backward()
            optimizer.step()

    profile = record(loop)

    def label(name: str) -> str:
        op = operators(profile, "forward", name)[0]
        return profile.labels[op.label] if op.label >= 0 else ""

    assert label("aten::addmm") == "inner"
    assert label("aten::mul") == "outer"
    assert len(profile.labels) == len(set(profile.labels))
    assert not any(op.name.startswith("profiler") for op in profile.operators)


def test_shapes_types_and_strides() -> None:
    (transpose, *_) = operators(net_profile(), "forward", "aten::t.")
    (use,) = transpose.outputs
    assert (use.dtype, use.shape, use.strides) == ("float32", (4, 8), (1, 4))
    (loss,) = operators(net_profile(), "forward", "aten::nll_loss_forward")
    assert loss.inputs[1].dtype == "int64"
    assert loss.outputs[0].shape == ()


def test_mutation() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=True)

    def loop() -> None:
        for _ in range(2):
            hidden = model(torch.randn(5, 4)).relu_()
            total = torch.empty(())
            torch.sum(hidden.detach(), dim=(0, 1), out=total)
            hidden.sum().backward()
            optimizer.step()

    profile = record(loop)
    (relu,) = operators(profile, "forward", "aten::relu_")
    assert relu.mutates == (relu.outputs[0].storage,)
    (out,) = operators(profile, "forward", "aten::sum.IntList_out")
    assert out.mutates == (out.outputs[0].storage,)
    update = operators(profile, "optimizer", "aten::_foreach_add_")[-1]
    assert {profile.storages[i].name for i in update.mutates} == {
        "Linear.weight",
        "Linear.bias",
    }
    assert not operators(profile, "forward", "aten::addmm")[0].mutates


def test_calls_of_modules() -> None:
    profile = net_profile()
    paths = [profile.modules[call.module].path for call in profile.calls]
    assert paths == ["Net.first", "Net.second", "Net"]
    first, second, root = profile.calls
    assert (root.depth, first.depth, second.depth) == (0, 1, 1)
    assert root.first == first.first
    assert first.last <= second.first
    assert second.last == root.last
    assert all(call.graded for call in profile.calls)
    assert root.outputs == second.outputs
    assert first.inputs == root.inputs


def test_an_evaluation_between_steps_is_not_graded() -> None:
    sample = linear_relu()
    optimizer = torch.optim.SGD(sample.model.parameters(), 0.1)

    def loop() -> None:
        for _ in range(2):
            train(sample, optimizer)
            with torch.no_grad():
                sample.model(sample.inputs)
            torch.ones(3).cos()

    profile = record(loop)
    assert [call.graded for call in profile.calls if call.depth == 0] == [True, False]
    assert operators(profile, "other", "aten::cos")


def test_waits_for_the_loader() -> None:
    sample = linear_relu()
    optimizer = torch.optim.SGD(sample.model.parameters(), 0.1)
    data = TensorDataset(sample.inputs.repeat(4, 1), sample.targets.repeat(4))

    def loop() -> None:
        for sample.inputs, sample.targets in DataLoader(data, batch_size=5):
            train(sample, optimizer)

    profile = record(loop)
    (wait,) = profile.waits
    assert wait.workers == 0
    assert 0 < wait.start < profile.step_seconds
    assert 0 < wait.seconds < profile.step_seconds
    loading = operators(profile, "loader")
    assert all(wait.start <= op.start <= wait.start + wait.seconds for op in loading)


def test_a_lazy_module_has_its_size_in_the_end() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))
    optimizer: list[torch.optim.Optimizer] = []

    def loop() -> None:
        for _ in range(3):
            loss = model(torch.randn(5, 4)).sum()
            optimizer[:] = optimizer or [torch.optim.SGD(model.parameters(), 0.1)]
            loss.backward()
            optimizer[0].step()

    profile = record(loop)
    assert [m.parameter_bytes for m in profile.modules] == [
        0,
        (4 + 1) * 8 * 4,
        0,
        (8 + 1) * 3 * 4,
    ]
    assert len(named(profile, "parameter")) == 4


def test_what_comes_after_a_pause_is_not_in_the_profile() -> None:
    model = nn.Linear(4, 4)
    loop = Loop(warmup=0, allocator=CpuAllocator())
    with loop.watcher:
        model(torch.ones(2, 4)).sum().backward()
        assert loop.recording is not None
        loop.recording.pause()
        torch.ones(1000).cos()
        profile = loop.finish()
    assert not any(op.name.startswith("aten::cos") for op in profile.operators)
    assert operators(profile, "backward", "aten::mm")
    assert 0 < profile.peak_bytes < 4000


def add() -> torch.Tensor:
    return torch.ones(3, device="cuda") + 1


def test_one_call_is_recorded() -> None:
    profile = record_call(add, device="emulated")
    assert [op.name for op in profile.operators] == ["aten::ones.default", "aten::add.Tensor"]
    assert profile.device == "emulated"
    assert check(profile) is None


def test_without_a_gpu_it_is_emulated_by_itself() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert record_call(add).device == "emulated"
    assert current() is None


def test_an_emulation_that_runs_is_used() -> None:
    with emulate() as emulation:
        record_call(add)
        assert current() is emulation
        assert torch.ones(1, device="cuda").is_cuda


def test_calls_before_are_not_recorded() -> None:
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        torch.ones(len(calls), device="cuda")

    profile = record_call(call, warmup=2, device="emulated")
    assert len(calls) == 3
    assert [op.outputs[0].shape for op in profile.operators] == [(3,)]


def test_modules_of_the_call_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    profile = record_call(lambda: model(torch.ones(1, 2)), device="cpu")
    assert any(storage.kind == "parameter" for storage in profile.storages)
    assert {module.type for module in profile.modules} >= {"Sequential", "Linear", "ReLU"}


def test_lines_of_the_project_are_the_users() -> None:
    inside = record_call(add, device="emulated", project=Path(__file__).parent)
    assert inside.places[inside.operators[0].place].path == __file__


def test_a_call_that_fails_leaves_nothing_behind() -> None:
    def fail() -> None:
        torch.ones(1, device="cuda")
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            record_call(fail, device="emulated")
        assert current() is None
    assert record_call(add, device="emulated").operators


def test_on_the_cpu_nothing_waits() -> None:
    profile = record_call(lambda: torch.ones(3).sum().item(), device="cpu")
    assert not profile.syncs
    assert profile.operators
