"""The tuner against a grid of settings, on constructed loaders: `python -m bench.loaders [NAME ...]`.

Each loader is tuned, then every setting of the grid goes through two epochs. The quickest of the grid and
the chosen setting then take turns, so that what else runs here slows all of them down alike. Said are the
chosen setting's speed as a share of the best point's, by the median of these rounds, and the tuner's time as
a share of the grid's. A setting that is itself the best point has a share of 1.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bench import machine
from torchtrim.data import tune
from torchtrim.data.parts import BatchSource, cores_here, parts_of
from torchtrim.data.rebuild import end_workers, rebuilt, settings_of
from torchtrim.records.loader import LoaderSettings

BATCH, BATCHES, EPOCHS = 16, 64, 2
ROUNDS, QUICKEST = 5, 3
Step = Callable[[Any], object]


class Made(Dataset[Tensor]):
    """Samples that take so long to read and to decode, in seconds, and have so many values."""

    def __init__(self, read: float = 0.0, decode: float = 0.0, values: int = 256) -> None:
        self.read, self.decode, self.values = read, decode, values

    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, index: int) -> Tensor:
        if self.read:
            time.sleep(self.read)
        end = time.thread_time() + self.decode
        while time.thread_time() < end:
            pass
        return torch.full((self.values,), float(index))


def slow_collate(samples: list[Tensor]) -> Tensor:
    """Puts samples together, and takes 20 ms for it."""
    end = time.thread_time() + 0.02
    while time.thread_time() < end:
        pass
    return torch.stack(samples)


def step_of(seconds: float) -> Step:
    """A step that waits for a device so long, as that of a GPU does."""
    return lambda _: time.sleep(seconds)


def loaders() -> dict[str, tuple[DataLoader[Any], Step]]:
    """The loaders and what is done with their batches."""
    rows = TensorDataset(torch.rand(BATCH * BATCHES, 64), torch.arange(BATCH * BATCHES))
    many = TensorDataset(torch.rand(1 << 16, 16), torch.arange(1 << 16))
    return {
        "slow read": (DataLoader(Made(read=0.002), BATCH), step_of(0.01)),
        "slow decode": (DataLoader(Made(decode=0.002), BATCH), step_of(0.01)),
        "slow collate": (DataLoader(Made(), BATCH, collate_fn=slow_collate), step_of(0.01)),
        "read and decode": (DataLoader(Made(0.001, 0.001), BATCH), step_of(0.02)),
        "huge samples": (DataLoader(Made(values=1 << 20), BATCH), step_of(0.01)),
        "rows": (DataLoader(rows, BATCH), step_of(0.001)),
        "hidden": (DataLoader(Made(decode=0.0005), BATCH, num_workers=1), step_of(0.03)),
        "mis-set read": (DataLoader(Made(read=0.004), BATCH), step_of(0.005)),
        "mis-set rows": (DataLoader(many, 4096, num_workers=4), step_of(0.0005)),
        "rows one by one": (DataLoader(many, 4096, shuffle=True), step_of(0.0005)),
    }


def grid(loader: DataLoader[Any], step: Step) -> list[tuple[LoaderSettings, float]]:
    """Seconds of a batch at each point: epochs from their beginning, workers started and all."""
    found = []
    parts = parts_of(BatchSource.of(loader))
    points = itertools.product(range(cores_here() + 1), (1, 2, 4), (False, True))
    if parts is not None and parts.whole is not None:
        whole = LoaderSettings(whole=True)
        found.append((whole, epochs(rebuilt(loader, whole), step)))
    for workers, prefetch, persistent in points:
        if not workers and (prefetch > 1 or persistent):
            continue
        settings = LoaderSettings(workers=workers, prefetch=prefetch, persistent=persistent)
        found.append((settings, epochs(rebuilt(loader, settings), step)))
    return found


def epochs(loader: DataLoader[Any], step: Step) -> float:
    """Seconds of a batch over some epochs."""
    begin, count = time.perf_counter(), 0
    for _ in range(EPOCHS):
        for batch in loader:
            step(batch)
            count += 1
    end_workers(loader)
    return (time.perf_counter() - begin) / count


def compared(loader: DataLoader[Any], step: Step) -> dict[str, Any]:
    """The tuner beside the grid."""
    begin = time.perf_counter()
    tuned = tune(loader, step, seconds=60)
    middle = time.perf_counter()
    points = grid(loader, step)
    took = time.perf_counter() - middle
    chosen = tuned.tuning.chosen
    quickest = [one for one, _ in sorted(points, key=lambda one: one[1])[:QUICKEST]]
    before = settings_of(loader)
    seconds = in_turns(loader, step, dict.fromkeys((*quickest, chosen, before)))
    best = min(quickest, key=lambda one: statistics.median(seconds[one]))
    return {
        "share_of_best": _median_ratio(seconds[best], seconds[chosen]),
        "share_of_time": (middle - begin) / took,
        "times_as_fast": _median_ratio(seconds[before], seconds[chosen]),
        "chosen": [chosen.workers, chosen.prefetch],
        "whole": chosen.whole,
        "best": [best.workers, best.prefetch],
        "points": len(points),
        "rounds": ROUNDS,
    }


def in_turns(
    loader: DataLoader[Any], step: Step, settings: Iterable[LoaderSettings]
) -> dict[LoaderSettings, list[float]]:
    """Seconds of a batch with each of the settings, in rounds in which each has its turn."""
    found: dict[LoaderSettings, list[float]] = {one: [] for one in settings}
    for _ in range(ROUNDS):
        for one, seconds in found.items():
            seconds.append(epochs(rebuilt(loader, one), step))
    return found


def _median_ratio(one: list[float], other: list[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def main() -> None:
    """Compare, print and save."""
    wanted = sys.argv[1:]
    found = {}
    for name, (loader, step) in loaders().items():
        if not wanted or name in wanted:
            found[name] = compared(loader, step)
            print(name, json.dumps(found[name]), flush=True)
    known = machine.saved("loaders").get("loaders", {})
    machine.save("loaders", {"loaders": {**known, **found}})


if __name__ == "__main__":
    main()
