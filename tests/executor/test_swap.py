"""Several changes of one module, or of one optimizer's step, are taken back in any order."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from torchtrim.executor.stepping import Stepping
from torchtrim.executor.swap import Swapped

NAMES = "abc"
ORDERS = list(itertools.permutations(NAMES))


def saying(said: list[str], name: str) -> Callable[..., Any]:
    """A forward that says its name."""

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            said.append(name)
            return forward(*args)

        return run

    return wrap


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_a_modules_forward(order: tuple[str, ...], own: bool) -> None:
    module = nn.Linear(2, 2)
    if own:
        module.forward = module.forward  # type: ignore[method-assign]
    before = type(module), dict(module.__dict__)
    said: list[str] = []
    handles = {name: Swapped(module, saying(said, name)) for name in NAMES}
    left = list(reversed(NAMES))
    for name in order:
        handles[name].revert()
        left.remove(name)
        said.clear()
        module(torch.ones(1, 2))
        assert said == left
        assert own or type(copy.deepcopy(module)) is nn.Linear
    assert (type(module), module.__dict__) == before


def stepping(said: list[str], optimizer: torch.optim.Optimizer, name: str) -> Stepping:
    @contextlib.contextmanager
    def around(_: torch.optim.Optimizer) -> Iterator[None]:
        said.append(name)
        yield

    return Stepping("SGD", optimizer, around)


@pytest.mark.parametrize("order", ORDERS)
def test_an_optimizers_step(order: tuple[str, ...]) -> None:
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], 0.1)
    said: list[str] = []
    handles = {name: stepping(said, optimizer, name) for name in NAMES}
    left = list(reversed(NAMES))
    for name in order:
        handles[name].revert()
        left.remove(name)
        said.clear()
        optimizer.step()
        assert said == left
    assert "step" not in optimizer.__dict__


def test_what_a_scheduler_has_wrapped_stays_and_only_calls_on() -> None:
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], 0.1)
    said: list[str] = []
    first = stepping(said, optimizer, "a")
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    wrapped = optimizer.step
    second = stepping(said, optimizer, "b")
    first.revert()
    second.revert()
    optimizer.step()
    assert said == []
    assert optimizer.step == wrapped


def test_a_call_that_is_traced_runs_as_it_is() -> None:
    said: list[str] = []
    module = nn.Linear(2, 2)
    swapped = Swapped(module, saying(said, "a"))
    traced = torch.jit.trace(module, torch.ones(1, 2), check_trace=False)
    assert torch.equal(traced(torch.ones(1, 2)), module(torch.ones(1, 2)))
    assert said == ["a"]
    swapped.revert()


class Rectified(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.linear(x))


@pytest.mark.parametrize("export", [torch.jit.script, torch.fx.symbolic_trace])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_changed_model_is_exported_as_it_was(export: Callable[[nn.Module], Any]) -> None:
    said: list[str] = []
    model = nn.Sequential(Rectified(), nn.ReLU(), nn.Dropout(0.0))
    changes = [Swapped(module, saying(said, "a")) for module in model]
    exported, x = export(model), torch.ones(1, 2)
    assert said == []
    assert torch.equal(exported(x), model(x))
    for change in changes:
        change.revert()
