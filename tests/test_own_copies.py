"""What torchtrim itself keeps, to restart from and for odd steps, counts nowhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import torchtrim
from steps import ConvNet, fitting, images, squared
from torchtrim import TrainStep
from torchtrim.capture.recording import tensors_in
from torchtrim.capture.snapshot import Snapshot
from torchtrim.capture.workload import Inference
from torchtrim.dispatch.storages import storage_bytes, storages_in
from torchtrim.emulator.device import emulate

KINDS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cpu":
        yield "cpu"
        return
    with emulate():
        yield "cuda"


def step_on(device: str, kind: str) -> TrainStep:
    torch.manual_seed(0)
    model = ConvNet(8, 2).to(device)
    return TrainStep(model, squared, KINDS[kind](model.parameters()), images(16, 4).to(device))


def train(step: TrainStep, steps: int = 3, *, keep_gradients: bool = False) -> None:
    (optimizer,) = step.optimizers
    for _ in range(steps):
        optimizer.zero_grad()
        squared(step.model, step.batch).backward()
        optimizer.step()
    if not keep_gradients:
        optimizer.zero_grad()


def peak(step: TrainStep) -> int:
    """The original's peak, the same in every step."""
    trial = fitting(step).observe()
    assert len({one.peak_bytes for one in trial.steps[1:]}) == 1
    return trial.peak_bytes


def floor(step: TrainStep) -> tuple[int, int]:
    """Peaks of the original and of the plan with the smallest."""
    found = fitting(step, 1).smallest()
    assert found.planned is not None
    return found.original.peak_bytes, found.planned.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_training_before_changes_neither_the_peak_nor_the_floor(device: str, kind: str) -> None:
    step = step_on(device, kind)
    fresh = peak(step)
    train(step)
    original, smallest = floor(step)
    assert original == fresh
    assert floor(step) == (fresh, smallest)
    with torchtrim.fit(step, smallest, steps=1) as fitted:
        assert fitted.planned is not None
        assert fitted.planned.peak_bytes <= smallest


def test_old_gradients_that_the_step_lets_go_of_are_ours(device: str) -> None:
    step = step_on(device, "momentum")
    fresh = peak(step)
    train(step, keep_gradients=True)
    assert peak(step) == fresh
    assert all(parameter.grad is not None for parameter in step.model.parameters())


def test_copies_to_restart_from_lie_on_the_host() -> None:
    with emulate():
        step = step_on("cuda", "adamw")
        train(step)
        before = torch.cuda.memory_allocated()
        snapshot = Snapshot([step.model], step.optimizers)
        assert torch.cuda.memory_allocated() == before
        kept = snapshot.kept()
        state = storages_in(tensors_in([step.model.state_dict(), _states(step)]))
        assert storage_bytes(kept) == sum(storage.nbytes() for storage in state.values())
        train(step)
        snapshot.restore()


def test_a_second_batch_lies_on_the_host_until_its_turn() -> None:
    with emulate():
        step = step_on("cuda", "momentum")
        size = step.batch.untyped_storage().nbytes()
        before = torch.cuda.memory_allocated()
        step.prepare()
        assert torch.cuda.memory_allocated() == before
        assert storage_bytes(step.spare(), "cpu") == size
        step.turn(1)
        assert torch.cuda.memory_allocated() == before + size
        assert storage_bytes(step.spare(), "cuda") == size
        step.turn(2)
        assert torch.cuda.memory_allocated() == before


def test_tensors_that_both_batches_share_are_never_spare() -> None:
    weights = torch.ones(7)
    workload = Inference(nn.Linear(3, 1), {"input": torch.ones(4, 3), "weights": weights})
    workload.prepare()
    shared = weights.untyped_storage()._cdata
    for number in range(2):
        workload.turn(number)
        spare = {storage._cdata for storage in workload.spare()}
        assert len(spare) == 1
        assert shared not in spare


def test_an_inference_call_is_recorded_without_the_making_of_its_batch() -> None:
    torch.manual_seed(0)
    profile = torchtrim.record(Inference(ConvNet().eval(), images()))
    assert profile.operators[0].name.startswith("aten::conv")
    batches = [s for s in profile.storages if s.kind == "input" and s.bytes == images().nbytes]
    assert len(batches) == 1


class Remembers(nn.Module):
    """Keeps its last output, as models with a cache do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.last: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.last = [y.detach().clone()]
        return y


def test_what_a_module_let_go_of_is_ours() -> None:
    torch.manual_seed(0)
    model = Remembers()
    x = torch.randn(256, 64)
    step = TrainStep(model, squared, torch.optim.SGD(model.parameters(), 0.1), x)
    fresh = fitting(step).observe().peak_bytes
    model(x)
    assert fitting(step).observe().peak_bytes == fresh
    assert model.last[0].shape == (256, 64)


def _states(step: TrainStep) -> list[dict[str, torch.Tensor]]:
    return [state for optimizer in step.optimizers for state in optimizer.state.values()]
