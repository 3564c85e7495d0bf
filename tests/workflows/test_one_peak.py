"""`diagnose`, `optimize` and the allocator's events give one peak for one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from torchtrim import TrainStep
from torchtrim.api import diagnose_report
from torchtrim.records.terms import Terms
from torchtrim.records.trial import Request
from torchtrim.workflows.optimize.fitting import Fitting

CLASSES = 4000
KEPT: list[Any] = []


def logits_without_a_name(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long))


def logits_in_a_local(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    logits = model(x)
    probabilities = logits.softmax(-1)
    return -probabilities[:, 0].log().mean()


def logits_in_a_container(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    KEPT[:] = [{"logits": model(x)}]
    return functional.cross_entropy(KEPT[0]["logits"], torch.zeros(len(x), dtype=torch.long))


def and_a_log_that_grows(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = logits_without_a_name(model, x)
    LOG.append(loss.item())
    return loss


def and_a_batch_of_its_own(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    batch = {"x": x * 2, "y": [torch.zeros(len(x), dtype=torch.long)]}
    return functional.cross_entropy(model(batch["x"]), batch["y"][0])


LOG: list[float] = []
LOSSES = (
    logits_without_a_name,
    logits_in_a_local,
    logits_in_a_container,
    and_a_log_that_grows,
    and_a_batch_of_its_own,
)


def step_of(loss: Callable[..., torch.Tensor]) -> TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return TrainStep(model, loss, optimizer, torch.randn(64, 32))


def allocated(step: TrainStep) -> int:
    """The step's peak by torch's profiler, with what was there before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
        step.step(0)  # the end of a block is an event only where its beginning was one
    tensors = [*step.model.parameters(), step.batch]
    tensors += [one["momentum_buffer"] for one in step.optimizers[0].state.values()]
    level = highest = sum(one.nbytes for one in tensors) + sum(
        one.nbytes for kept in KEPT for one in kept.values()
    )
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step.step(0)
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda one: one.start_ns()):
        level += event.nbytes()
        highest = max(highest, level)
    return highest


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_they_agree(loss: Callable[..., torch.Tensor]) -> None:
    KEPT.clear()
    diagnosed = diagnose_report(step_of(loss), Request()).report.original
    KEPT.clear()
    optimized = Fitting(step_of(loss), Request(), lambda _: None, Terms()).observe()
    KEPT.clear()
    assert diagnosed is not None
    assert diagnosed.peak_bytes == optimized.peak_bytes
    assert diagnosed.peak_bytes == pytest.approx(allocated(step_of(loss)), rel=2e-4)
