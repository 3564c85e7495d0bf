from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import get_gradient_edge
from torch.optim import optimizer as optimizers
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from capture.loops import record
from models import SAMPLES, train
from torchtrim.capture.watch import Listener, Watcher


class Told(Listener):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.waits: list[tuple[int, int, int]] = []

    def module_starts(self, module: nn.Module, args: Any, kwargs: Any, depth: int) -> None:
        self.events.append(f"{type(module).__name__} starts at {depth}")

    def module_ends(self, module: nn.Module, output: Any, depth: int) -> None:
        self.events.append(
            f"{type(module).__name__} ends at {depth}" + " raising" * (output is None)
        )

    def root_appears(self, root: nn.Module) -> None:
        self.events.append(f"root {type(root).__name__}")

    def backward_starts(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self.events.append(f"backward of {len(tensors)}")

    def backward_ends(self) -> None:
        self.events.append("backward ends")

    def optimizer_starts(self, optimizer: torch.optim.Optimizer) -> None:
        self.events.append(f"{type(optimizer).__name__} starts")

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        self.events.append(f"{type(optimizer).__name__} ends")

    def loader_waited(self, start_ns: int, end_ns: int, workers: int) -> None:
        self.waits.append((start_ns, end_ns, workers))

    def training_begins(self) -> None:
        self.events.append("training")

    def step_idles(self) -> None:
        self.events.append("idle")

    def step_ends(self) -> None:
        self.events.append("step")


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def watcher(told: Told) -> Iterator[Watcher]:
    """A watcher that watches."""
    with Watcher(told) as watcher:
        yield watcher


def hooks() -> tuple[Any, ...]:
    return (
        nn.Module.__call__,
        torch.autograd.backward,
        _BaseDataLoaderIter.__next__,
        dict(optimizers._global_optimizer_pre_hooks),
        dict(optimizers._global_optimizer_post_hooks),
    )


def test_all_is_as_it_was_when_the_watcher_is_removed(told: Told) -> None:
    before = hooks()
    watcher = Watcher(told)
    watcher.install()
    assert all(a != b for a, b in zip(before, hooks(), strict=True))
    watcher.remove()
    assert hooks() == before
    watcher.remove()
    assert hooks() == before


def test_all_is_as_it_was_after_an_exception(told: Told) -> None:
    before = hooks()
    with pytest.raises(ZeroDivisionError), Watcher(told):
        _ = 1 / 0
    assert hooks() == before


def test_what_others_put_around_ours_stays_and_ours_is_silent(told: Told) -> None:
    original = nn.Module.__call__
    with Watcher(told):
        ours = nn.Module.__call__
        theirs = lambda module, *args: ours(module, *args)  # noqa: E731
        nn.Module.__call__ = theirs
    try:
        assert nn.Module.__call__ is theirs
        nn.Linear(1, 1)(torch.ones(1))
    finally:
        nn.Module.__call__ = original
    assert told.events == []


@pytest.mark.usefixtures("watcher")
def test_a_step_from_beginning_to_end(told: Told) -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    step = [
        "Sequential starts at 0",
        "ReLU starts at 1",
        "ReLU ends at 1",
        "Linear starts at 1",
        "Linear ends at 1",
        "Sequential ends at 0",
        "backward of 1",
        "backward ends",
        "SGD starts",
        "SGD ends",
    ]
    assert told.events == ["root Sequential", "training", *step, "step", *step]


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")


@pytest.mark.usefixtures("watcher")
def test_an_exception_in_a_forward_keeps_the_depth_right(told: Told) -> None:
    model = nn.Sequential(nn.Sequential(Raises()))
    with pytest.raises(ValueError, match="no"):
        model(torch.ones(1))
    nn.ReLU()(torch.ones(1))
    assert told.events[-7:] == [
        "Raises starts at 2",
        "Raises ends at 2 raising",
        "Sequential ends at 1 raising",
        "Sequential ends at 0 raising",
        "root ReLU",
        "ReLU starts at 0",
        "ReLU ends at 0",
    ]


@pytest.mark.usefixtures("watcher")
def test_a_backward_that_raises_has_ended(told: Told) -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(()).backward()
    assert told.events == ["backward of 1", "backward ends"]


def test_other_threads_are_ignored(told: Told, watcher: Watcher) -> None:
    model = nn.Linear(2, 2)
    thread = threading.Thread(target=lambda: model(torch.ones(2)).sum().backward())
    thread.start()
    thread.join()
    assert told.events == []
    assert not watcher.roots


class CallsAModule(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.model(torch.ones(2)).detach() + os.getpid() * 0


def test_workers_of_a_loader_are_ignored_and_waits_are_told(told: Told, watcher: Watcher) -> None:
    for _ in DataLoader(
        CallsAModule(), batch_size=2, num_workers=1, multiprocessing_context="fork"
    ):
        pass
    assert told.events == []
    assert [workers for _, _, workers in told.waits] == [1, 1, 1]
    assert all(start < end for start, end, _ in told.waits)
    for _ in DataLoader(CallsAModule(), batch_size=2):
        pass
    assert watcher.forwards == 0
    CallsAModule()[0]
    assert watcher.forwards == 1
    assert [workers for _, _, workers in told.waits[3:]] == [0, 0, 0]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.usefixtures("watcher")
def test_recomputation_inside_backward_is_no_call_of_a_root(told: Told, reentrant: bool) -> None:
    sample = SAMPLES["checkpointed reentrant" if reentrant else "checkpointed"]()
    optimizer = torch.optim.SGD(sample.model.parameters(), 0.1)
    train(sample, optimizer, steps=2)
    assert told.events.count("Checkpointed starts at 0") == 2
    assert told.events.count("step") == 1
    assert [event for event in told.events if event.startswith("root")] == ["root Checkpointed"]
    assert told.events.count("Sequential starts at -1") == 6
    assert told.events.count("Sequential starts at 1") == 6
    assert not any(event.endswith("at 0 raising") for event in told.events)


@pytest.mark.usefixtures("watcher")
def test_a_root_that_is_recomputed_is_called_once(told: Told) -> None:
    model = nn.Linear(2, 2)
    checkpoint(model, torch.ones(2), use_reentrant=False).sum().backward()
    assert told.events.count("Linear starts at 0") == 1
    assert told.events.count("Linear starts at -1") == 1


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_does_not_begin_a_step(told: Told, watcher: Watcher, off: Any) -> None:
    sample = SAMPLES["mlp"]()
    optimizer = torch.optim.SGD(sample.model.parameters(), 0.1)
    train(sample, optimizer)
    assert watcher.stepped
    with off():
        sample.model(sample.inputs)
    assert watcher.stepped
    assert "step" not in told.events
    train(sample, optimizer)
    assert told.events.count("step") == 1
    assert watcher.forwards == 2


def test_a_plot_of_learning_rates_before_the_loop_is_no_step(told: Told, watcher: Watcher) -> None:
    for _ in range(3):
        plotted = torch.optim.Adam(nn.Linear(1, 1).parameters())
        for _ in range(4):
            plotted.step()
    sample = SAMPLES["mlp"]()
    optimizer = torch.optim.SGD(sample.model.parameters(), 0.1)
    for _ in range(3):
        train(sample, optimizer)
    assert told.events.count("step") == 2


class Around(torch.optim.Optimizer):
    """An optimizer around another, which alone steps, as in sharpness-aware minimization."""

    def __init__(self, parameters: Any, inner: type[torch.optim.Optimizer]) -> None:
        super().__init__(parameters, {})
        self.inner = inner(self.param_groups)
        self.param_groups = self.inner.param_groups


@pytest.mark.usefixtures("watcher")
def test_an_optimizer_around_another_is_not_waited_for(told: Told) -> None:
    sample = SAMPLES["mlp"]()
    around = Around(sample.model.parameters(), torch.optim.SGD)
    for _ in range(3):
        train(sample, around.inner)
    assert told.events.count("step") == 2


@pytest.mark.usefixtures("watcher")
def test_a_step_ends_outside_the_transforms_of_the_next(told: Told) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen: list[bool] = []
    told.step_ends = lambda: seen.append(is_functorch_wrapped_tensor(model.weight.abs()))  # type: ignore[method-assign]
    for _ in range(2):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        torch.vmap(model)(torch.ones(3, 2))
        optimizer.step()
    assert seen == [False] * 3


@pytest.mark.usefixtures("watcher")
def test_a_long_evaluation_is_told_once(told: Told) -> None:
    sample = SAMPLES["mlp"]()
    optimizer = torch.optim.SGD(sample.model.parameters(), 0.1)
    for _ in range(2):
        train(sample, optimizer)
        with torch.no_grad():
            for _ in range(5):
                sample.model(sample.inputs)
    assert [event for event in told.events if event in ("idle", "step")] == ["idle", "step", "idle"]


def test_autograd_grad_is_no_backward_and_begins_no_step(told: Told, watcher: Watcher) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        loss = model(torch.ones(2)).sum()
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            parameter.grad = gradient
        optimizer.step()
    assert watcher.backwards == 0
    assert told.events.count("step") == 1


class TestClosures:
    def loop(self, optimizer: torch.optim.Optimizer, model: nn.Module, steps: int = 3) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(4, 2)).square().mean()
            loss.backward()
            return loss

        for _ in range(steps):
            optimizer.step(closure)

    @pytest.mark.usefixtures("watcher")
    def test_a_step_ends_before_the_optimizer_that_calls_the_next_forward(self, told: Told) -> None:
        model = nn.Linear(2, 2)
        self.loop(torch.optim.SGD(model.parameters(), 0.1), model)
        events = [
            e for e in told.events if e in ("step", "SGD starts", "SGD ends", "backward of 1")
        ]
        step = ["SGD starts", "backward of 1", "SGD ends"]
        assert events == [*step, "step", *step, "step", *step]

    @pytest.mark.usefixtures("watcher")
    def test_lbfgs_calls_its_closure_many_times_in_one_step(self, told: Told) -> None:
        model = nn.Linear(2, 2)
        self.loop(torch.optim.LBFGS(model.parameters(), max_iter=4), model)
        assert told.events.count("step") == 2
        assert told.events.count("backward of 1") > 3

    def test_phases_inside_of_it(self) -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        profile = record(lambda: self.loop(optimizer, model))
        by_phase = {
            phase: {op.name for op in profile.operators if op.phase == phase}
            for phase in ("forward", "backward", "optimizer", "other")
        }
        assert "aten::addmm.default" in by_phase["forward"]
        assert "aten::mean.default" in by_phase["forward"]
        assert "aten::mm.default" in by_phase["backward"]
        assert "aten::cat.default" in by_phase["optimizer"]
        assert "aten::addmm.default" not in by_phase["optimizer"]
        assert not by_phase["other"]


class TestOptimizers:
    def test_all_that_live_are_waited_for(self, told: Told, watcher: Watcher) -> None:
        model, other = nn.Linear(2, 2), nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        kept = torch.optim.SGD(other.parameters(), 0.1)
        for _ in range(5):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
        assert told.events.count("step") == 0
        assert watcher.optimizers == [optimizer, kept]

    def test_none_is_waited_for_beside_those_that_are_known(self, told: Told) -> None:
        model, other = nn.Linear(2, 2), nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        kept = torch.optim.SGD(other.parameters(), 0.1)
        watcher = Watcher(told)
        watcher.optimizers.append(optimizer)
        with watcher:
            for _ in range(3):
                model(torch.ones(2)).sum().backward()
                optimizer.step()
        assert told.events.count("step") == 2
        del kept

    @pytest.mark.usefixtures("watcher")
    def test_two_in_one_segment(self, told: Told) -> None:
        models = [nn.Linear(2, 2), nn.Linear(2, 2)]
        both = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
        for _ in range(3):
            (models[0](torch.ones(2)) + models[1](torch.ones(2))).sum().backward()
            for optimizer in both:
                optimizer.step()
        assert told.events.count("step") == 2


def test_a_scripted_module_is_let_alone(told: Told, watcher: Watcher) -> None:
    scripted = torch.jit.trace(nn.Linear(2, 2), torch.ones(2))
    told.events.clear()
    watcher.roots.clear()
    assert scripted(torch.ones(2)).shape == (2,)
    assert told.events == []


def test_nothing_is_installed_by_importing() -> None:
    call = nn.Module.__call__
    assert call is nn.Module._wrapped_call_impl
    assert torch.autograd.backward.__module__ == "torch.autograd"
    assert _BaseDataLoaderIter.__next__.__module__ == "torch.utils.data.dataloader"
    assert not optimizers._global_optimizer_pre_hooks
    assert not optimizers._global_optimizer_post_hooks


def test_the_loop_of_a_dataset_in_this_process(told: Told, watcher: Watcher) -> None:
    data = TensorDataset(torch.ones(4, 2))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for (batch,) in DataLoader(data, batch_size=1):
        model(batch).sum().backward()
        optimizer.step()
    assert told.events.count("step") == 3
    assert watcher.stepped


def test_backward_takes_whatever_torch_takes(told: Told, watcher: Watcher) -> None:
    model = nn.Linear(2, 2)
    torch.autograd.backward(loss for loss in (model(torch.ones(2)).sum(),))
    assert model.weight.grad is not None
    edge = get_gradient_edge(model(torch.ones(2)).sum())
    torch.autograd.backward((edge,), (torch.ones(()),))
    assert watcher.backwards == 2


class Normalised(torch.utils.data.Dataset[torch.Tensor]):
    """Its items go through a module, as transforms of pictures do."""

    def __init__(self) -> None:
        self.transform = nn.BatchNorm1d(2)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.transform(torch.randn(3, 2))


def test_modules_that_a_loader_calls_are_no_roots_and_end_no_step(
    told: Told, watcher: Watcher
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in torch.utils.data.DataLoader(Normalised()):
        model(batch.detach()).sum().backward()
        optimizer.step()
    assert watcher.roots == [model]
    assert watcher.forwards == 4
    assert told.events.count("step") == 3


def test_a_call_that_is_traced_is_let_alone(told: Told, watcher: Watcher) -> None:
    with watcher:
        net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        traced = torch.jit.trace(net, torch.ones(1, 2), check_trace=False)
        traced(torch.ones(3, 2))
    assert told.events == []
    assert watcher.roots == []


def test_a_model_without_values_is_let_alone(told: Told, watcher: Watcher) -> None:
    with watcher:
        net = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).to("meta")
        net(torch.ones(3, 2, device="meta")).sum().backward()
        assert told.events == []
        nn.Linear(2, 2)(torch.ones(3, 2))
    assert told.events[0] == "root Linear"


@pytest.mark.slow
def test_torchs_profiler_finds_the_module_of_each_call() -> None:
    """With stacks it looks at the frame of `nn.Module.__call__`, whose code it learns once in a process.

    Torch imports dynamo on the way; inside a profile, the freed code of its modules would have garbage names.
    """
    code = """
import torch
import torch._dynamo
from torch.profiler import ProfilerActivity, profile
from torchtrim.capture.watch import Listener, Watcher
with Watcher(Listener()), profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiled:
    torch.nn.Sequential(torch.nn.Linear(4, 4))(torch.ones(2, 4)).sum().backward()
print([event.name for event in profiled.events() if event.name.startswith("nn.Module")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["['nn.Module:", "Sequential_0',", "'nn.Module:", "Linear_0']"]
