"""Steps with and without their loader, by a clock that only moves where it is told to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from torchtrim.capture.input_steps import InputSteps, Loaders, cost_of, waited_cost
from torchtrim.capture.watch import Listener, Watcher
from torchtrim.core.clock import Clock


class Time:
    """Passes where it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now, lambda: self.now, lambda: self.now)


class Sleeps(Dataset[Tensor]):
    def __init__(self, time: Time, seconds: float, count: int = 400) -> None:
        self.time, self.seconds, self.count = time, seconds, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        self.time.now += self.seconds
        return torch.full((1,), float(index))


class Listens(Listener):
    """Gives the steps what the loop wants, as a session does."""

    def __init__(self, steps: InputSteps) -> None:
        self.steps = steps
        self.loaders = Loaders(lambda: ("train.py", 7))

    def loader_appears(self, loader: Any) -> None:
        self.loaders.appears(loader)

    def loader_begins(self, iterator: Any, loader: Any) -> None:
        self.loaders.begins(iterator, loader)

    def batch(self, iterator: Any, following: Any) -> Any:
        return self.steps.batch(iterator, following)


def run(time: Time, loop: Any, seconds: float = 0.1) -> tuple[InputSteps, Listens, list[Tensor]]:
    """Drive a loop, given as an iterator of steps that yields after each, until no more are wanted."""
    steps = InputSteps(seconds, time.clock)
    listens = Listens(steps)
    seen = []
    with Watcher(listens):
        looping = loop()
        seen.append(next(looping))
        while steps.next():
            seen.append(next(looping))
            steps.step_ends()
    return steps, listens, seen


def test_the_price_is_the_difference() -> None:
    time = Time()

    def loop() -> Iterator[Tensor]:
        for batch in DataLoader(Sleeps(time, 0.05), batch_size=2):
            time.now += 0.02
            yield batch

    steps, listens, _ = run(time, loop)
    cost = cost_of(steps, listens.loaders, time.clock)
    assert cost is not None
    assert cost.step_seconds == pytest.approx(0.12)
    assert cost.ready_seconds == pytest.approx(0.02)
    assert cost.waited_seconds == pytest.approx(0.1)
    assert cost.price == pytest.approx(0.1)
    assert (cost.path, cost.line, cost.batches) == ("train.py", 7, 1)
    assert cost.parts is not None
    assert cost.parts.samples == 2


def test_steps_that_are_ready_get_the_last_batch_again() -> None:
    time = Time()

    def loop() -> Iterator[Tensor]:
        for batch in DataLoader(Sleeps(time, 0.05), batch_size=1):
            time.now += 0.01
            yield batch

    steps, _, seen = run(time, loop)
    fresh = len(steps.loading) + 1
    assert [float(one) for one in seen[:fresh]] == list(range(fresh))
    assert {float(one) for one in seen[fresh:]} == {fresh - 1.0}


def test_several_batches_and_loaders_a_step() -> None:
    time = Time()

    def loop() -> Iterator[Tensor]:
        first = iter(DataLoader(Sleeps(time, 0.01)))
        second = iter(DataLoader(Sleeps(time, 0.04)))
        while True:
            yield next(first) + next(second) + next(second)
            time.now += 0.03

    steps, listens, _ = run(time, loop)
    cost = cost_of(steps, listens.loaders, time.clock)
    assert cost is not None
    assert cost.batches == 3
    assert cost.price == pytest.approx(0.09)
    assert steps.main._dataset.seconds == 0.04


def test_a_loop_that_evaluates_comes_to_its_end() -> None:
    time = Time()
    held = Sleeps(time, 0.01, 6)

    def loop() -> Iterator[Tensor]:
        for batch in DataLoader(Sleeps(time, 0.05)):
            time.now += 0.01
            for _ in DataLoader(held):
                time.now += 0.01
            yield batch

    steps, _, _ = run(time, loop)
    assert steps.phase == "over"


def test_epochs_that_end_begin_again() -> None:
    time = Time()

    def loop() -> Iterator[Tensor]:
        loader = DataLoader(Sleeps(time, 0.05, 3))
        while True:
            for batch in loader:
                time.now += 0.01
                yield batch

    steps, listens, _ = run(time, loop)
    cost = cost_of(steps, listens.loaders, time.clock)
    assert cost is not None
    assert cost.price == pytest.approx(0.05)


def test_without_a_loader_one_step_is_enough() -> None:
    time = Time()

    def loop() -> Iterator[Tensor]:
        while True:
            time.now += 0.01
            yield torch.ones(1)

    steps, listens, seen = run(time, loop)
    assert len(seen) == 2
    assert cost_of(steps, listens.loaders) is None


@pytest.mark.parametrize(("seconds", "ran"), [(0.1, True), (9.0, True), (11.0, False)])
def test_steps_that_take_long_are_not_run(seconds: float, ran: bool) -> None:
    assert InputSteps(seconds).next() is ran


def test_it_takes_a_limited_time() -> None:
    time = Time()

    def loop() -> Iterator[Tensor]:
        for batch in DataLoader(Sleeps(time, 3.0)):
            time.now += 1.0
            yield batch

    steps, _, _ = run(time, loop, 4.0)
    assert len(steps.loading) == 2
    assert time.now < 30


def test_a_step_that_does_not_end_is_late() -> None:
    time = Time()
    steps = InputSteps(0.1, time.clock)
    assert not steps.late()
    assert steps.next()
    time.now += 4.0
    assert not steps.late()
    time.now += 4.0
    assert steps.late()


def test_by_the_waits_alone() -> None:
    time = Time()
    loader: Any = DataLoader(Sleeps(time, 0.05), batch_size=2)
    cost = waited_cost(iter(loader), 1.0, 7.81, Loaders(lambda: ("", 0)))
    assert cost.ready_seconds is None
    assert cost.price == 1.0
    assert (cost.path, cost.line) == ("", 0)
