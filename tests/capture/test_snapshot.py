from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from models import OPTIMIZERS, SAMPLES, Sample, train
from torchtrim.capture.snapshot import Snapshot
from torchtrim.errors import Unsupported


def state(sample: Sample, optimizer: torch.optim.Optimizer) -> Any:
    """All that may change, as values."""
    return copy.deepcopy(
        {
            "model": sample.model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "gradients": [parameter.grad for parameter in sample.model.parameters()],
            "torch": torch.get_rng_state(),
        }
    )


def assert_same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("name", ["resnet", "tied", "mlp"])
def test_all_is_as_it_was(name: str, make_optimizer: Callable[..., Any], warm: bool) -> None:
    sample = SAMPLES[name]()
    optimizer = make_optimizer(sample.model.parameters())
    train(sample, optimizer, steps=int(warm))
    before = state(sample, optimizer)
    tensors = [id(tensor) for tensor in (*sample.model.parameters(), *sample.model.buffers())]
    snapshot = Snapshot([sample.model], [optimizer])
    train(sample, optimizer, steps=2)
    sample.model.eval()
    sample.loss().backward()
    snapshot.restore()
    assert_same(state(sample, optimizer), before)
    assert sample.model.training
    assert tensors == [id(t) for t in (*sample.model.parameters(), *sample.model.buffers())]


def test_what_follows_is_what_would_have_followed() -> None:
    sample = SAMPLES["mlp"]()
    optimizer = OPTIMIZERS["adam single"](sample.model.parameters())
    train(sample, optimizer)
    snapshot = Snapshot([sample.model], [optimizer])
    train(sample, optimizer, steps=2)
    expected = state(sample, optimizer)
    snapshot.restore()
    train(sample, optimizer, steps=2)
    assert_same(state(sample, optimizer), expected)


def test_copies_that_are_larger_than_the_room_are_in_files(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    view = torch.arange(40.0)[4:10]
    model.register_buffer("view", view)
    optimizer = torch.optim.Adam(model.parameters())
    before = copy.deepcopy(model.state_dict())
    for room in (0, 1 << 20):
        snapshot = Snapshot([model], [optimizer], folder=tmp_path, room=room)
        files = [one.stat().st_size for one in tmp_path.iterdir()]
        assert bool(files) == (room == 0)
        assert all(size < 4000 for size in files)
        assert not files or not snapshot.kept()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        view.zero_()
        snapshot.restore()
        assert_same(model.state_dict(), before)
        snapshot.forget()
        assert not [*tmp_path.iterdir()]


def test_it_can_be_restored_twice() -> None:
    sample = SAMPLES["mlp"]()
    optimizer = OPTIMIZERS["sgd"](sample.model.parameters())
    train(sample, optimizer)
    before = state(sample, optimizer)
    snapshot = Snapshot([sample.model], [optimizer])
    for _ in range(2):
        train(sample, optimizer)
        snapshot.restore()
        assert_same(state(sample, optimizer), before)


def test_gradients_stay_the_same_tensors() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(2)).sum().backward()
    gradient = model.weight.grad
    value = model.weight.grad.clone()
    snapshot = Snapshot([model], [])
    model(torch.ones(2)).sum().backward()
    model.zero_grad()
    snapshot.restore()
    assert model.weight.grad is gradient
    assert_same(gradient, value)
    model.zero_grad()
    Snapshot([model], []).restore()
    assert model.weight.grad is None


def test_every_random_generator() -> None:
    model = nn.Identity()
    model.rng = own = np.random.RandomState(1)

    def draw() -> tuple[float, ...]:
        ours = random.random(), float(np.random.randn()), own.rand()
        return *ours, float(torch.rand(()))

    snapshot = Snapshot([model], [])
    first = draw()
    snapshot.restore()
    assert draw() == first


def test_types_and_memory_of_parameters_that_were_converted() -> None:
    model = nn.BatchNorm1d(3)
    memory = model.weight.data_ptr()
    snapshot = Snapshot([model], [])
    model.double()
    model(torch.ones(2, 3, dtype=torch.float64))
    snapshot.restore()
    assert model.weight.dtype == model.running_mean.dtype == torch.float32
    assert model.weight.data_ptr() == memory
    assert_same(model.running_mean, torch.zeros(3))


def test_plain_attributes_of_modules() -> None:
    model = nn.Linear(2, 2)
    model.calls, model.name = 3, "first"
    snapshot = Snapshot([model], [])
    model.calls, model.name, model.in_features = 4, None, 7
    model.weight.requires_grad_(False)
    model.register_buffer("extra", torch.ones(1))
    snapshot.restore()
    assert (model.calls, model.name, model.in_features) == (3, "first", 2)
    assert model.weight.requires_grad
    assert "extra" not in dict(model.named_buffers())


def test_a_buffer_whose_elements_share_memory() -> None:
    model = nn.Module()
    model.register_buffer("mask", torch.zeros(1).expand(4))
    snapshot = Snapshot([model], [])
    model.mask.untyped_storage().fill_(1)
    snapshot.restore()
    assert_same(model.mask, torch.zeros(4))
    assert model.mask.stride() == (0,)


def test_lbfgs_and_its_lists() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x, y = torch.randn(8, 2), torch.randn(8, 2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    snapshot = Snapshot([model], [optimizer])
    expected = [optimizer.step(closure).item() for _ in range(2)]
    snapshot.restore()
    assert [optimizer.step(closure).item() for _ in range(2)] == expected


def test_a_learning_rate_that_is_a_tensor() -> None:
    model = nn.Linear(2, 2)
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    snapshot = Snapshot([model], [optimizer])
    rate.fill_(0.1)
    optimizer.param_groups[0]["weight_decay"] = 0.3
    optimizer.param_groups[0]["initial_lr"] = 1.0
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    snapshot.restore()
    (group,) = optimizer.param_groups
    assert group["lr"] is rate
    assert float(rate) == 0.5
    assert group["weight_decay"] == 0
    assert "initial_lr" not in group


def test_sparse_gradients() -> None:
    model = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    model(torch.tensor([1, 2])).sum().backward()
    gradient = model.weight.grad.to_dense()
    snapshot = Snapshot([model], [optimizer])
    optimizer.step()
    model(torch.tensor([4])).sum().backward()
    snapshot.restore()
    assert_same(model.weight.grad.to_dense(), gradient)
    assert not optimizer.state


def test_parameters_outside_all_modules() -> None:
    scale = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([scale], 0.1)
    snapshot = Snapshot([], [optimizer])
    (scale * 2).sum().backward()
    optimizer.step()
    snapshot.restore()
    assert_same(scale.detach(), torch.ones(3))
    assert scale.grad is None


def test_lazy_parameters_are_refused() -> None:
    with pytest.raises(Unsupported, match="Run it once"):
        Snapshot([nn.LazyLinear(3)], [])
