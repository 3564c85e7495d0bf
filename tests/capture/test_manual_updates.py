from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from torchtrim.capture.watch import ByHand, Listener, Watcher
from torchtrim.dryrun.run import dry_run


def data(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.data.add_(p.grad, alpha=-0.1)


def no_grad(p: nn.Parameter) -> None:
    assert p.grad is not None
    with torch.no_grad():
        p -= 0.1 * p.grad


def replaced(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.data = p.data - 0.1 * p.grad


@pytest.mark.parametrize("update", [data, no_grad, replaced])
@pytest.mark.parametrize("transposed", [False, True])
def test_an_update_is_seen_however_it_is_written(
    update: Callable[[nn.Parameter], None], transposed: bool
) -> None:
    model = nn.Linear(40, 30)
    if transposed:
        model.weight = nn.Parameter(torch.randn(40, 30).t())
    by_hand = ByHand()
    assert not by_hand.changed()
    model(torch.randn(2, 40)).sum().backward()
    by_hand.backward_ends([model])
    assert not by_hand.changed()
    update(model.weight)
    assert by_hand.changed()
    assert not by_hand.changed()


@pytest.mark.parametrize("update", [data, no_grad, replaced])
def test_an_update_is_seen_where_there_are_no_numbers(
    update: Callable[[nn.Parameter], None],
) -> None:
    by_hand = ByHand()
    with dry_run(".", owned_only=True):
        model = nn.Linear(1000, 300)
        model(torch.randn(2, 1000)).sum().backward()
        by_hand.backward_ends([model])
        assert not by_hand.changed()
        update(model.weight)
        assert by_hand.changed()
        assert not by_hand.changed()


class Counting(Listener):
    steps = 0

    def step_ends(self) -> None:
        self.steps += 1


def loop(model: nn.Module, updates: str, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Backward for each letter; `u` updates by hand after it, `s` steps the optimizer. How many steps."""
    told = Counting()
    with Watcher(told) as watcher:
        if optimizer is None and "s" in updates:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for letter in updates:
            model(torch.ones(2, 4)).sum().backward()
            if letter == "u":
                data(next(iter(model.parameters())))
            if letter == "s":
                assert optimizer is not None
                optimizer.step()
        return told.steps + watcher.stepped


def test_steps_end_where_parameters_were_changed() -> None:
    assert loop(nn.Linear(4, 4), "uuu") == 3


def test_micro_batches_belong_to_the_update_that_follows() -> None:
    assert loop(nn.Linear(4, 4), "..u..u..") == 2


def test_with_an_optimizer_only_it_makes_steps() -> None:
    assert loop(nn.Linear(4, 4), "us.us") == 2
