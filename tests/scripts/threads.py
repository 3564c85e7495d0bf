"""A loop that trains where the first argument says: in the main thread, in another, in a pool."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.utils.data import DataLoader

kind = sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 64))


def train(broken: int = 100, beside: Callable[[], None] = lambda: None) -> None:
    """Steps over a loader, with an optimizer, both made here."""
    optimizer = torch.optim.Adam(model.parameters())
    batches = DataLoader(torch.randn(640, 64), batch_size=32)  # type: ignore[arg-type]
    for number, batch in enumerate(batches):
        if number == broken:
            raise ValueError("the second batch")
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()


class Trainer(threading.Thread):
    """A thread that overrides `run`."""

    def run(self) -> None:
        """Train."""
        train()


if kind == "main":
    train()
if kind == "thread":
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    sys.exit("not reached while steps are recorded")
if kind == "class":
    Trainer().start()
if kind == "pool":
    ThreadPoolExecutor(2).submit(train).result()
if kind == "evaluation":
    model.eval()
    threading.Thread(target=train).start()
if kind == "fails":
    threading.Thread(target=train, args=(1,)).start()
if kind == "pool-fails":
    ThreadPoolExecutor(1).submit(train, 1)
if kind == "first":
    thread = threading.Thread(target=lambda: model(torch.zeros(1, 64)))
    thread.start()
    thread.join()
    train()
if kind == "two":
    other = nn.Linear(64, 64)
    train(beside=lambda: other(torch.zeros(8, 64)).sum().backward())
