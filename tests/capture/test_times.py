from __future__ import annotations

import itertools
import time
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import torchtrim
from profiles import Step
from torchtrim import TrainStep
from torchtrim.capture import recorder
from torchtrim.capture.times import Times, with_times
from torchtrim.dispatch.places import Places
from torchtrim.records.profile import Profile


def two_operators() -> Profile:
    step = Step()
    x = step.alive("input", 10)
    made = step.op("aten::relu", x, makes=10, seconds=0.003)
    step.op("aten::tanh", made, makes=10, seconds=0.001)
    return step.profile()


def test_the_median_and_the_spread_of_steps_that_are_alike() -> None:
    profile = two_operators()
    names = [op.name for op in profile.operators]
    alike = [list(zip(names, seconds, strict=True)) for seconds in ((0.001, 0.002), (0.002, 0.009))]
    other = [("aten::relu.default", 5.0)]
    found = with_times(profile, [alike[0], other, alike[1]])
    assert [op.seconds for op in found.operators] == [0.002, 0.002]
    assert [op.spread for op in found.operators] == pytest.approx([0.002, 0.008])
    assert found.recorded_steps == 3
    assert with_times(profile, [other]) is profile
    assert [op.spread for op in profile.operators] == [0.0, 0.0]


def run(times: Times, layer: nn.Linear) -> int:
    steps = 0
    while times.next():
        layer(torch.ones(2, 4)).sum().backward()
        times.step_ends()
        layer.zero_grad()
        steps += 1
    return steps


def test_no_more_steps_than_wanted_and_none_of_long_ones() -> None:
    places = Places(str(Path(__file__).parent))
    times = Times(2, 0.01, places)
    assert run(times, nn.Linear(4, 4)) == 2
    assert len({tuple(name for name, _ in step) for step in times.steps}) == 1
    assert all(seconds > 0 for step in times.steps for _, seconds in step)
    assert not Times(2, 3.1, places).next()
    assert not Times(0, 0.01, places).next()


def test_a_step_that_goes_on_too_long_is_late() -> None:
    times = Times(1, 0.0, Places("/"))
    assert not times.late()
    assert times.next()
    assert not times.late()
    time.sleep(0.15)
    assert times.late()
    times.abandon()
    assert (times.steps, times.next()) == ([], False)


def test_a_queue_that_is_longer_than_the_time_that_passed_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scheduler's clock is another one: no operator takes less than nothing."""
    seconds = itertools.count(step=10**9)
    monkeypatch.setattr(recorder, "queued_ns", lambda: next(seconds))
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    step = TrainStep(layer, lambda model, batch: model(batch).sum(), optimizer, torch.randn(2, 4))
    profile = torchtrim.record(step)
    assert {op.seconds for op in profile.operators} == {0.0}
    encoded = msgspec.json.encode(profile)
    assert msgspec.json.decode(encoded, type=Profile).operators == profile.operators
