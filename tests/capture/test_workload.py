from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from torchtrim.capture.workload import Inference, TrainStep


class Seen(nn.Module):
    """Keeps what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.calls: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls.append(kwargs or args)
        return self.weight.sum()


def batches_of(batch: Any, **options: Any) -> tuple[Any, Any]:
    """What the loss function gets in an even and in an odd step."""
    got: list[Any] = []

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        got.append(batch)
        return model()

    model = Seen()
    step = TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), batch, **options)
    for number in range(4):
        step.step(number)
    assert got[0] is got[2]
    assert got[1] is got[3]
    return got[0], got[1]


def test_a_training_step_trains() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = model.weight.detach().clone()

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).sub(batch[1]).square().mean()

    TrainStep(model, loss_fn, optimizer, (torch.ones(4, 2), torch.ones(4, 1))).step(0)
    assert not torch.equal(model.weight, before)
    assert model.weight.grad is None


def test_the_second_batch_has_the_same_samples_in_another_order() -> None:
    x, y = torch.arange(8.0).view(4, 2), torch.arange(4)
    first, second = batches_of((x, y))
    assert first == (x, y)
    assert torch.equal(second[0], x.roll(1, 0))
    assert torch.equal(second[1], y.roll(1, 0))


def test_what_has_no_samples_stays() -> None:
    x, weights, scale = torch.arange(8.0).view(4, 2), torch.arange(10.0), torch.tensor(3.0)
    sparse = torch.eye(4).to_sparse()
    _, second = batches_of(
        {"x": x, "y": x + 1, "weights": weights, "s": scale, "e": sparse, "n": 7}
    )
    assert torch.equal(second["weights"], weights)
    assert second["s"] is scale
    assert second["e"] is sparse
    assert second["n"] == 7
    assert torch.equal(second["y"], x.roll(1, 0) + 1)


def test_a_second_batch_may_be_given() -> None:
    _, second = batches_of(torch.ones(2), second_batch=5)
    assert second == 5


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    pairs: list[Pair]


class Encoding(UserDict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self.data[name]


def test_a_batch_keeps_its_type() -> None:
    x = torch.arange(3)
    rolled = x.roll(1, 0)
    first, second = batches_of(Batch(x, [Pair(x, x)]))
    assert type(second) is Batch
    assert torch.equal(first.x, x)
    assert torch.equal(second.x, rolled)
    assert torch.equal(second.pairs[0].y, rolled)
    first, second = batches_of(Encoding(x=x))
    assert type(second) is Encoding
    assert torch.equal(second.x, rolled)
    assert torch.equal(first.x, x)


def test_inference_takes_a_tensor_a_tuple_or_a_dict() -> None:
    x = torch.arange(3)
    for inputs in (x, (x, 5), {"x": x}):
        model = Seen()
        workload = Inference(model, inputs)
        for number in range(2):
            workload.step(number)
        first, second = model.calls
        if isinstance(inputs, dict):
            assert torch.equal(second["x"], x.roll(1, 0))
        else:
            assert torch.equal(first[0], x)
            assert torch.equal(second[0], x.roll(1, 0))
        assert not workload.optimizers


def test_inference_keeps_no_gradients() -> None:
    outputs: list[torch.Tensor] = []
    model = nn.Linear(2, 1)
    model.register_forward_hook(lambda module, args, output: outputs.append(output))
    Inference(model, torch.ones(1, 2)).step(0)
    assert not outputs[0].requires_grad


def test_a_step_in_another_type_casts_what_is_floating() -> None:
    model = Seen()
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    wave = torch.ones(2, dtype=torch.complex64)
    inputs = torch.ones(2), torch.arange(2), Pair(torch.ones(2), torch.ones(1)), packed, wave
    Inference(model, inputs).step(0, torch.float64)
    x, number, pair, rows, waves = model.calls[0]
    assert (x.dtype, number.dtype, pair.y.dtype) == (torch.float64, torch.int64, torch.float64)
    assert isinstance(rows, PackedSequence)
    assert (rows.data.dtype, rows.batch_sizes.dtype) == (torch.float64, torch.int64)
    assert waves.dtype == torch.complex128
