"""Compiled functions that call a model."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from torchtrim.capture.watch import Listener, Watcher
from torchtrim.compiled.graphs import Graphs
from torchtrim.planner.plans import graphs_plan
from torchtrim.records.plan import CompiledGraph, Prediction
from torchtrim.runner.compiled_calls import CompiledCalls, roots_of
from torchtrim.runner.compiling import INDUCTOR, OnCompile
from torchtrim.runner.run_watch import RunWatch

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)


class Told(Listener):
    """Writes down what it is told of roots."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.steps = 0

    def root_appears(self, root: nn.Module) -> None:
        self.events.append(f"root {type(root).__name__}")

    def module_starts(self, module: nn.Module, args: Any, kwargs: Any, depth: int) -> None:
        self.events += [f"{type(module).__name__} starts"] * (depth == 0)

    def module_ends(self, module: nn.Module, output: Any, depth: int) -> None:
        self.events += [f"{type(module).__name__} ends"] * (depth == 0)

    def backward_starts(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self.events.append("backward")

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        self.events.append(f"{type(optimizer).__name__} ends")

    def step_ends(self) -> None:
        self.steps += 1


@contextlib.contextmanager
def watched(told: Told | None = None) -> Iterator[Told]:
    torch._dynamo.reset()
    told, graphs = told or Told(), Graphs()
    watcher = Watcher(told)
    calls = CompiledCalls(watcher)
    on_compile = OnCompile(kept=(INDUCTOR,), calls=calls.watched)
    on_compile.install()
    try:
        with watcher, graphs.watched(), calls.noted():
            yield told
    finally:
        on_compile.remove()
        torch._dynamo.reset()  # it keeps the functions, and their optimizers alive


def compiled(function: Callable[..., Any], how: str) -> Callable[..., Any]:
    return torch.compile(function) if how == "call" else torch.compile(dynamic=False)(function)


@pytest.mark.parametrize("how", ["call", "decorator"])
def test_a_compiled_loss_is_a_forward_of_the_model_it_calls(how: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with watched() as told:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss = compiled(lambda x: model(x).sum(), how)
        for _ in range(3):
            loss(torch.ones(2, 3)).backward()
            optimizer.step()
    step = ["Sequential starts", "Sequential ends", "backward", "SGD ends"]
    assert told.events == ["root Sequential", *step, *step, *step]
    assert told.steps == 2


def test_a_whole_step_compiled_has_its_backward_and_its_optimizer() -> None:
    model = nn.Linear(3, 3)

    with watched() as told:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        compiled_step, before = torch.compile(step), model.bias.detach().clone()
        for _ in range(3):
            compiled_step(torch.ones(2, 3))
    assert told.events.count("backward") == told.events.count("SGD ends") == 3
    assert told.steps == 2
    assert torch.allclose(before - model.bias, torch.full((3,), 0.6))


def test_what_is_noted_of_a_backward_in_a_compiled_step_is_not_compiled() -> None:
    traced: list[str] = []

    class Notes(Told):
        def backward_starts(self, tensors: tuple[torch.Tensor, ...]) -> None:
            traced.extend("compiled" for _ in tensors if torch.compiler.is_dynamo_compiling())
            super().backward_starts(tensors)

        def backward_ends(self) -> None:
            self.events.append("compiled" if torch.compiler.is_dynamo_compiling() else "plain")

    model = nn.Linear(3, 3)
    with watched(Notes()) as told, warnings.catch_warnings():
        warnings.simplefilter("error")  # Dynamo warns of what it cannot trace
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        @torch.compile
        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            torch.autograd.backward(model(x).sum())
            optimizer.step()

        for rows in (2, 3, 4):
            step(torch.ones(rows, 3))
    assert not traced
    assert told.events.count("backward") == told.events.count("plain") == 3
    assert told.steps == 2


def test_a_compiled_optimizer_step_is_seen_and_is_no_forward() -> None:
    model = nn.Linear(3, 3)
    with watched() as told:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        update = torch.compile(lambda: optimizer.step())
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
            update()
    step = ["Linear starts", "Linear ends", "backward", "SGD ends"]
    assert told.events == ["root Linear", *step, *step, *step]
    assert told.steps == 2


def test_a_compiled_function_without_parameters_is_no_forward() -> None:
    model = nn.Linear(3, 3)
    with watched() as told:
        loss = torch.compile(lambda y: y.square().mean())
        loss(model(torch.ones(2, 3))).backward()
    assert told.events == ["root Linear", "Linear starts", "Linear ends", "backward"]


def test_what_a_step_compiles_last_is_planned_though_it_computes_nothing() -> None:
    model = nn.Linear(3, 3)
    torch._dynamo.reset()
    graphs = Graphs()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    with graphs.watched():
        compiled_step = torch.compile(step)
        for _ in range(2):
            graphs.begin()
            compiled_step(torch.ones(2, 3))
    assert graphs.memory().peak_bytes > 0


def test_roots_are_the_outermost_modules() -> None:
    inner = nn.Linear(2, 2)
    outer = nn.Sequential(nn.Sequential(inner))
    other = nn.Linear(2, 2)
    assert roots_of([other.weight, inner.bias]) == [other, outer]


def planned_watch() -> RunWatch:
    predicted = Prediction(peak_bytes=1, step_seconds=0.1, device="cpu")
    graphs = (CompiledGraph(graph="a", saves=()),)
    planned = graphs_plan(
        "a.py", graphs, fingerprint={}, predicted=predicted, budget_bytes=1, script_sha256=""
    )
    return RunWatch(planned, print)


def test_a_planned_run_counts_the_steps_of_a_compiled_function_by_its_calls() -> None:
    model, watch = nn.Linear(8, 8), planned_watch()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch.watch("Net", model)
    watch.begin(1)
    for _ in range(3):
        watch.called(model, lambda x: nn.Linear.forward(model, x).sum(), (torch.ones(2, 8),), {})
        optimizer.step()
        watch.optimizer_ends(optimizer)  # as the watcher tells; a compiled step runs no hook
    watch.end()
    assert watch.steps == 3


def test_a_planned_run_counts_the_steps_of_a_model_that_compiles_itself() -> None:
    model, watch = nn.Linear(8, 8), planned_watch()
    model.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch.watch("Net", model)
    watch.begin(1)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        watch.optimizer_ends(optimizer)
    watch.end()
    assert watch.steps == 3
