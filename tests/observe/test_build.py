from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from models import SAMPLES, Sample, train
from observe.loops import kinds, made_by, operators, record
from torchtrim.records.profile import Profile, Storage

HERE = __file__


def linear_relu() -> Sample:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return Sample(model, torch.randn(5, 4), torch.randint(3, (5,)))


def trained(sample: Sample, **options: bool) -> Profile:
    optimizer = torch.optim.Adam(sample.model.parameters(), **options)
    return record(lambda: train(sample, optimizer, steps=2))


def named(profile: Profile, kind: str) -> dict[str, Storage]:
    return {storage.name: storage for storage in profile.storages if storage.kind == kind}


def line_of(function: Callable[..., object], text: str) -> int:
    """The line of the function's source that holds the text."""
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


class TestKinds:
    def test_a_linear_net_with_adam(self) -> None:
        profile = trained(linear_relu())
        layers = ("Sequential.0.weight", "Sequential.0.bias", "Sequential.2.weight")
        layers += ("Sequential.2.bias",)
        parameters, gradients = named(profile, "parameter"), named(profile, "gradient")
        assert set(parameters) == set(gradients) == set(layers)
        assert parameters["Sequential.0.weight"].bytes == 4 * 8 * 4
        assert all(storage.birth == -1 for storage in parameters.values())
        assert all(storage.birth >= 0 for storage in gradients.values())
        assert set(named(profile, "optimizer_state")) == {
            f"Adam.{number}.{key}"
            for number in range(4)
            for key in ("step", "exp_avg", "exp_avg_sq")
        }
        first, second = made_by(profile, "aten::addmm")
        (relu,) = made_by(profile, "aten::relu")
        assert (first.kind, relu.kind, second.kind) == ("temporary", "activation", "temporary")
        assert relu.bytes == 5 * 8 * 4
        assert kinds(made_by(profile, "aten::_log_softmax")) == ["activation"]
        assert kinds(made_by(profile, "aten::threshold_backward", "backward")) == ["temporary"]

    def test_states_made_in_the_recorded_step(self) -> None:
        sample = linear_relu()
        optimizer = torch.optim.Adam(sample.model.parameters())
        profile = record(lambda: train(sample, optimizer), warmup=0)
        states = named(profile, "optimizer_state")
        assert len(states) == 12
        assert all(storage.birth >= 0 for storage in states.values())
        assert all(storage.death == len(profile.operators) for storage in states.values())

    def test_batch_norm(self) -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        profile = trained(Sample(model, torch.randn(5, 4), torch.randint(8, (5,))))
        assert set(named(profile, "buffer")) == {
            f"Sequential.1.{name}"
            for name in ("running_mean", "running_var", "num_batches_tracked")
        }
        assert kinds(made_by(profile, "aten::addmm")) == ["activation"]
        output, mean, deviation = made_by(profile, "aten::native_batch_norm")
        assert output.kind == "temporary"
        assert mean.kind == deviation.kind == "activation"
        assert mean.bytes == deviation.bytes == 8 * 4

    def test_the_mask_of_a_dropout_is_an_activation(self) -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5))
        profile = trained(Sample(model, torch.randn(5, 4), torch.randint(8, (5,))))
        assert kinds(made_by(profile, "aten::empty_like")) == ["activation"]
        (product,) = made_by(profile, "aten::mul")
        assert product.kind == "temporary"

    def test_a_view_has_the_storage_of_its_base(self) -> None:
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

    def test_gradients_that_accumulate_over_micro_batches(self) -> None:
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

    def test_gradients_that_are_zeroed_and_kept(self) -> None:
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

    def test_what_is_saved_but_never_read(self) -> None:
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

    def test_what_python_alone_holds_is_temporary(self) -> None:
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

    def test_tied_weights_are_one_parameter(self) -> None:
        profile = trained(SAMPLES["tied"]())
        parameters = named(profile, "parameter")
        assert "TiedLM.embedding.weight" in parameters
        assert "TiedLM.head.weight" not in parameters
        gradients = [s for s in profile.storages if s.name == "TiedLM.embedding.weight"]
        assert kinds(gradients) == ["parameter", "gradient"]

    def test_a_batch_from_a_loader_is_input(self) -> None:
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

    def test_what_no_operator_made_is_input(self) -> None:
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

    def test_a_parameter_outside_all_modules_is_named_after_its_optimizer(self) -> None:
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

    def test_a_gradient_that_the_optimizer_frees_inside_backward(self) -> None:
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


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden = hidden.tanh()
        return self.second(hidden)


class TestOperators:
    def profile(self) -> Profile:
        return trained(Sample(Net(), torch.randn(5, 4), torch.randint(3, (5,))))

    def test_phases_come_in_order(self) -> None:
        phases = [op.phase for op in self.profile().operators]
        assert list(dict.fromkeys(phases)) == ["forward", "backward", "optimizer"]

    def test_module_and_line_of_each(self) -> None:
        profile = self.profile()
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
    def test_backward_has_the_forward_operators_line_and_module(self, name: str) -> None:
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

    def test_the_forward_operator_is_the_right_one(self) -> None:
        profile = self.profile()
        (tanh,) = operators(profile, "backward", "aten::tanh_backward")
        assert profile.operators[tanh.forward].name == "aten::tanh.default"
        (softmax,) = operators(profile, "backward", "aten::_log_softmax_backward_data")
        assert profile.operators[softmax.forward].name == "aten::_log_softmax.default"

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_recomputation_has_the_line_and_module_of_the_forward(self, reentrant: bool) -> None:
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
    def test_recomputation_of_plain_functions(self, reentrant: bool) -> None:
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
        names = [
            op.name for op in operators(profile, "recompute") if op.name != "aten::detach.default"
        ]
        assert names[:2] == ["aten::tanh.default", "aten::sigmoid.default"]
        (tanh,) = operators(profile, "recompute", "aten::tanh")
        assert profile.places[tanh.place].line == line_of(block, "tanh")

    def test_the_line_of_a_recomputed_library_module_is_that_of_its_forward(self) -> None:
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

    def test_a_gradient_taken_inside_a_forward_is_backward(self) -> None:
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

    def test_labels(self) -> None:
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

    def test_shapes_types_and_strides(self) -> None:
        (transpose, *_) = operators(self.profile(), "forward", "aten::t.")
        (use,) = transpose.outputs
        assert (use.dtype, use.shape, use.strides) == ("float32", (4, 8), (1, 4))
        (loss,) = operators(self.profile(), "forward", "aten::nll_loss_forward")
        assert loss.inputs[1].dtype == "int64"
        assert loss.outputs[0].shape == ()

    def test_mutation(self) -> None:
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

    def test_calls_of_modules(self) -> None:
        profile = self.profile()
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

    def test_an_evaluation_between_steps_is_not_graded(self) -> None:
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

    def test_waits_for_the_loader(self) -> None:
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

    def test_a_lazy_module_has_its_size_in_the_end(self) -> None:
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
