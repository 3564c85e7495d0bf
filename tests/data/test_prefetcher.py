from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from torchtrim import UsageError
from torchtrim.data import Prefetcher
from torchtrim.emulator import emulate

ORDERS = ("", "early", "late", "random:1", "random:2", "random:3")
EVERY = pytest.mark.parametrize("order", ORDERS)


class Draws(Dataset[Tensor]):
    """Samples that are transformed at random, in the process that reads them."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3,), index / 12) + torch.rand(3) + random.random()


class Breaks(Dataset[Tensor]):
    """Sample 5 cannot be read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        if index == 5:
            raise OSError("sample 5 is damaged")
        return torch.full((2,), float(index))


def rows(count: int = 12) -> TensorDataset:
    return TensorDataset(torch.arange(float(count * 3)).reshape(count, 3) / 36, torch.arange(count))


def trained(order: str, batches: Any, depth: int | None) -> tuple[list[Tensor], list[str]]:
    """Parameters after training with dropout, prefetched or moved by hand, and the races."""
    torch.manual_seed(0)
    random.seed(0)
    with emulate(streams=order) as emulation:
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        loader = batches()
        for batch in loader if depth is None else Prefetcher(loader, "cuda", depth):
            x = batch[0] if isinstance(batch, list) else batch
            loss = model(x.cuda() if depth is None else x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()
        found = [parameter.detach().cpu() for parameter in model.parameters()]
        races = [] if emulation.orders is None else [one.row for one in emulation.orders.races()]
    return found, races


def shuffled() -> DataLoader[Any]:
    return DataLoader(rows(), batch_size=2, shuffle=True, pin_memory=True)


def drawing() -> DataLoader[Any]:
    return DataLoader(Draws(), batch_size=2, shuffle=True, pin_memory=True)


@EVERY
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("batches", [shuffled, drawing])
def test_training_is_equal_in_every_order_of_streams(order: str, depth: int, batches: Any) -> None:
    reference, _ = trained("", batches, None)
    assert all(bool(one.isfinite().all()) for one in reference)
    found, races = trained(order, batches, depth)
    assert all(torch.equal(a, b) for a, b in zip(reference, found, strict=True))
    assert races == []


class Forgets(Prefetcher[Any]):
    """As it would be wrong: the step is not ordered behind the copy."""

    def __iter__(self) -> Iterator[Any]:
        ways = super().__iter__()
        ways._receive = lambda entry: None  # type: ignore[attr-defined]
        return ways


def test_without_its_wait_it_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.Prefetcher", Forgets)
    reference, _ = trained("", shuffled, None)
    found, races = trained("late", shuffled, 1)
    assert races
    assert not all(torch.equal(a, b) for a, b in zip(reference, found, strict=True))


class Asked:
    """A loader that notes how far it was asked."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked = 0

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.count):
            self.asked += 1
            yield torch.full((2,), float(number))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_it_asks_no_further_ahead_than_its_depth(depth: int) -> None:
    loader = Asked(12)
    with emulate():
        for taken, _ in enumerate(Prefetcher(loader, "cuda", depth), start=1):
            most = taken if taken <= 2 else taken + depth
            assert loader.asked == min(most, 12)
    assert loader.asked == 12


def test_an_error_comes_at_its_batch() -> None:
    seen: list[float] = []
    with emulate():
        batches = iter(Prefetcher(DataLoader(Breaks(), batch_size=1), "cuda", 3))
        with pytest.raises(OSError, match="sample 5"):
            seen.extend(float(batch[0, 0]) for batch in batches)
        assert seen == [0, 1, 2, 3, 4]
        assert [float(batch[0, 0]) for batch in batches] == [6, 7]


def test_an_end_is_an_end() -> None:
    with emulate():
        batches = iter(Prefetcher(Asked(3), "cuda", 2))
        assert len(list(batches)) == 3
        assert list(batches) == []
        assert list(Prefetcher(Asked(0), "cuda")) == []


def test_a_loop_that_is_left_leaves_nothing_and_can_begin_again() -> None:
    threads = threading.active_count()
    with emulate():
        prefetched = Prefetcher(Asked(6), "cuda", 2)
        for _ in prefetched:
            break
        assert threading.active_count() == threads
        assert [float(batch[0]) for batch in prefetched] == [0, 1, 2, 3, 4, 5]


def test_an_interrupt_comes_at_once() -> None:
    def interrupted() -> Iterator[Tensor]:
        yield from (torch.zeros(1) for _ in range(4))
        raise KeyboardInterrupt

    class Loader:
        def __iter__(self) -> Iterator[Tensor]:
            return interrupted()

    with emulate():
        batches = iter(Prefetcher(Loader(), "cuda", 1))
        assert len([next(batches) for _ in range(3)]) == 3
        with pytest.raises(KeyboardInterrupt):
            next(batches)


def test_what_draws_in_this_process_is_asked_in_turn() -> None:
    with emulate():
        drawn, plain = Prefetcher(drawing(), "cuda"), Prefetcher(shuffled(), "cuda")
        assert len(list(drawn)) == len(list(plain)) == 6
        assert not drawn.ahead
        assert plain.ahead


def test_what_draws_later_is_told() -> None:
    class Later:
        def __iter__(self) -> Iterator[Tensor]:
            yield from (torch.zeros(1) for _ in range(3))
            yield torch.rand(1)
            yield torch.zeros(1)

    with emulate(), pytest.warns(UserWarning, match="not prefetched"):
        assert len(list(Prefetcher(Later(), "cuda", 2))) == 5


def test_every_kind_of_batch_is_moved() -> None:
    class Moves:
        def __init__(self, x: Tensor) -> None:
            self.x = x

        def to(self, device: Any, non_blocking: bool = False) -> Moves:
            return Moves(self.x.to(device, non_blocking=non_blocking))

    batch = {"x": torch.ones(2), "more": [torch.ones(1), ("name", 3)], "own": Moves(torch.ones(1))}
    with emulate(streams="late") as emulation:
        (found,) = Prefetcher([batch], "cuda")
        own = found["own"]
        assert isinstance(own, Moves)
        assert own.x.is_cuda
        x, (first, rest) = found["x"], found["more"]
        assert isinstance(x, Tensor)
        assert x.is_cuda
        assert first.is_cuda
        assert rest == ("name", 3)
        assert float((x.sum() + first.sum() + own.x.sum()).cpu()) == 4
        assert emulation.orders is not None
        assert emulation.orders.races() == []


def test_on_the_cpu_batches_are_as_they_were() -> None:
    loader = Asked(3)
    for number, batch in enumerate(Prefetcher(loader, "cpu", 2), start=1):
        assert loader.asked == number
        assert batch.device.type == "cpu"
    assert len(Prefetcher(DataLoader(rows(), batch_size=4), "cpu")) == 3


@pytest.mark.parametrize("depth", [0, -1, True, 1.5])
def test_a_depth_is_a_number_of_batches(depth: Any) -> None:
    with pytest.raises(UsageError, match="depth="):
        Prefetcher([], "cpu", depth)


@pytest.mark.parametrize("device", ["tpu9", "nonsense", None, 3.5])
def test_a_device_is_there(device: Any) -> None:
    with pytest.raises(UsageError, match="does not exist on this machine"):
        Prefetcher([], device)
