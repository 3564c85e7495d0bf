"""The tuner on real loaders. What is quickest depends on the machine; what it may choose does not."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    default_collate,
)

from torchtrim import UsageError
from torchtrim.data import tune
from torchtrim.data.parts import cores_here, free_bytes
from torchtrim.data.rebuild import rebuilt, settings_of, written
from torchtrim.records.loader import LoaderSettings

NONE = LoaderSettings()


class Rows(Dataset[tuple[Tensor, int]]):
    """Samples that are not drawn, one at a time."""

    def __init__(self, count: int = 40) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> tuple[Tensor, int]:
        assert isinstance(index, int)
        return torch.full((4,), float(index)), index


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.arange(40.0).split(1))


def within_a_minute(holds: Callable[[], bool]) -> bool:
    """Whether something comes to hold; queues of workers that ended take a moment to close."""
    end = time.monotonic() + 60
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def ordered(loader: Any) -> list[list[float]]:
    return [batch[0].flatten().tolist() for batch in loader]


MAKES: dict[str, Any] = {
    "batches": lambda: DataLoader(Rows(), batch_size=6),
    "shuffled": lambda: DataLoader(Rows(), batch_size=6, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(
        Rows(), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "batch sampler": lambda: DataLoader(
        Rows(), batch_sampler=BatchSampler(RandomSampler(Rows()), 5, False)
    ),
    "one by one": lambda: DataLoader(Rows(), batch_size=None),
    "own collate": lambda: DataLoader(
        Rows(), batch_size=4, collate_fn=lambda rows: default_collate(rows[::-1])
    ),
    "a stream": lambda: DataLoader(Stream(), batch_size=4),
    "a stream, one by one": lambda: DataLoader(Stream(), batch_size=None),
}


@pytest.mark.parametrize("name", MAKES)
def test_a_rebuilt_loader_gives_the_same_batches(name: str) -> None:
    orders = []
    for build in (lambda one: one, lambda one: rebuilt(one, NONE)):
        torch.manual_seed(5)
        orders.append(ordered(build(MAKES[name]())))
    assert orders[0] == orders[1]
    assert orders[0]


def test_a_rebuilt_loader_with_workers_gives_the_same_batches() -> None:
    orders = []
    for workers in (0, 2):
        torch.manual_seed(5)
        settings = LoaderSettings(workers=workers, persistent=workers > 0)
        loader = rebuilt(MAKES["shuffled"](), settings)
        orders.append(ordered(loader))
        assert settings_of(loader) == settings
    assert orders[0] == orders[1]


def test_batches_asked_for_at_once_are_the_same() -> None:
    rows = TensorDataset(torch.arange(80.0).reshape(40, 2), torch.arange(40))
    loader: DataLoader[Any] = DataLoader(rows, batch_size=6, shuffle=True)
    orders = []
    for whole in (False, True):
        torch.manual_seed(5)
        orders.append(ordered(rebuilt(loader, LoaderSettings(whole=whole))))
    assert orders[0] == orders[1]


def test_it_tunes_and_leaves_everything_as_it_was() -> None:
    loader = DataLoader(Rows(), batch_size=4, shuffle=True)
    threads = threading.active_count()
    torch.manual_seed(3)
    random.seed(3)
    states = torch.get_rng_state(), random.getstate()
    seen = []
    found = tune(loader, lambda batch: seen.append(len(batch[1])), seconds=20)
    tuning = found.tuning
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert within_a_minute(lambda: threading.active_count() == threads)
    assert tuning.before == NONE == tuning.tried[0].settings
    assert tuning.chosen in [one.settings for one in tuning.tried]
    assert tuning.chosen.workers <= cores_here()
    assert tuning.source == "measured"
    assert settings_of(loader) == NONE
    assert settings_of(found.loader).workers == tuning.chosen.workers
    assert set(seen) == {4}
    assert " a batch: " in str(found)


def test_indexed_tensors_are_asked_for_at_once_where_that_is_equal() -> None:
    rows = TensorDataset(torch.rand(1 << 16, 2), torch.arange(1 << 16))
    found = tune(DataLoader(rows, batch_size=1 << 12), seconds=20)
    assert found.tuning.chosen.whole
    assert "BatchSampler" in found.line


def test_for_more_cores_than_here_it_is_modelled() -> None:
    found = tune(DataLoader(Rows(), batch_size=4), seconds=0.001, cores=cores_here() + 62)
    assert found.tuning.source == "modelled"
    assert found.tuning.cores == cores_here() + 62
    assert "modelled for" in str(found)


def test_a_loader_with_too_many_workers_is_measured_as_it_is_and_not_kept() -> None:
    now = LoaderSettings(workers=cores_here() + 1)
    loader = rebuilt(DataLoader(Rows(8), batch_size=2), now)
    found = tune(loader, seconds=30)
    assert found.tuning.before.workers == cores_here() + 1
    assert found.tuning.chosen.workers <= cores_here()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"seconds": 0}, "seconds=0"),
        ({"cores": 0}, "cores=0"),
        ({"memory": "much"}, "amount of memory"),
        ({"memory": "60%"}, "the peak is unknown"),
    ],
)
def test_bad_limits_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        tune(DataLoader(Rows(), batch_size=4), **arguments)


@pytest.mark.parametrize("loader", [[1, 2], None, "loader", iter([1])])
def test_only_a_loader_is_tuned(loader: Any) -> None:
    with pytest.raises(UsageError, match="expected a DataLoader, got"):
        tune(loader)


@pytest.mark.parametrize("count", [0, 2])
def test_a_loader_without_a_batch(count: int) -> None:
    with pytest.raises(UsageError, match="batch"):
        tune(DataLoader(Rows(count), batch_size=4, drop_last=True))


def test_what_changes_is_written_as_a_person_would() -> None:
    four = LoaderSettings(workers=4, persistent=True)
    assert written(four, NONE) == "num_workers=4, persistent_workers=True, prefetch_factor=2"
    assert written(NONE, four) == "num_workers=0, no persistent_workers, no prefetch_factor"
    assert written(four, four) == "nothing"


def test_the_machine_has_memory() -> None:
    assert free_bytes() >= 0
