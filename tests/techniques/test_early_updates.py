"""Backwards that no step surely follows: the program runs as without the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from steps import squared
from techniques.test_optimizer_in_backward import READS, Run, loss_of, same
from torchtrim.capture.spent import Spent


def both(step: Any, kind: str = "AdamW") -> tuple[Run, Run]:
    """The original and the planned loop after two steps as they should be and then `step(run)`."""
    runs = Run(kind), Run(kind, early=True)
    for run in runs:
        run.train(0, 2)
        torch.manual_seed(5)
        step(run)
    return runs


def with_a_gradient_read(run: Run) -> None:
    for read in READS.values():
        loss_of(run).backward()
        read(run)
        run.optimizer.step()
        run.optimizer.zero_grad()


def with_weights_read(run: Run) -> None:
    loss_of(run).backward()
    with torch.no_grad():
        run.net[0].weight += loss_of(run)
    run.optimizer.step()


def with_a_backward_too_many(run: Run) -> None:
    loss_of(run).backward()
    run.optimizer.zero_grad()
    loss_of(run).backward()
    run.optimizer.step()


def with_a_closure(run: Run) -> None:
    def closure() -> torch.Tensor:
        run.optimizer.zero_grad()
        loss = loss_of(run)
        loss.backward()
        return loss

    run.optimizer.step(closure)


def without_a_step(run: Run) -> None:
    loss_of(run).backward()


def with_a_guarded_step(run: Run) -> None:
    loss = loss_of(run)
    loss.backward()
    if loss.isfinite():
        run.optimizer.step()


def with_a_step_that_is_left_out(run: Run) -> None:
    loss = loss_of(run) * float("nan")
    loss.backward()
    if loss.isfinite():
        run.optimizer.step()
    run.optimizer.zero_grad()


def with_a_turn_left_out(run: Run) -> None:
    for number in range(3):
        loss = loss_of(run)
        loss.backward()
        if loss > 0 and number == 1:
            run.optimizer.zero_grad()
            continue
        run.optimizer.step()
        run.optimizer.zero_grad()


def with_a_saliency_map(run: Run) -> None:
    x = torch.randn(8, 37, requires_grad=True)
    squared(run.net, x).backward()
    run.optimizer.zero_grad()
    squared(run.net, x.detach() + 0.1 * x.grad.sign()).backward()
    run.optimizer.zero_grad()
    run.train(2, 3)


def with_a_hook(run: Run) -> None:
    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(run.net.parameters(), 1e-3)

    handle = run.optimizer.register_step_pre_hook(clip)
    run.train(2, 4)
    handle.remove()
    run.train(4, 6)


def with_a_hook_on_all(run: Run) -> None:
    def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in run.net.parameters():
            parameter.grad.mul_(0.5)

    handle = register_optimizer_step_pre_hook(halve)
    run.train(2, 4)
    handle.remove()


@pytest.mark.parametrize(
    "step",
    [
        with_a_gradient_read,
        with_weights_read,
        with_a_backward_too_many,
        with_a_closure,
        without_a_step,
        with_a_guarded_step,
        with_a_step_that_is_left_out,
        with_a_turn_left_out,
        with_a_saliency_map,
        with_a_hook,
        with_a_hook_on_all,
    ],
)
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_a_backward_that_no_step_follows_for_sure_is_as_without_the_plan(
    step: Any, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    original, planned = both(step, kind)
    same(original, planned)
    for a, b in zip(original.net.parameters(), planned.net.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None or isinstance(b.grad, Spent))
