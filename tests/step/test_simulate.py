"""The simulators against one that asks at every moment what is there."""

from __future__ import annotations

import random

import pytest

import draws
from step.oracle import bytes_before, moments, peak
from step.random_steps import random_edits, random_step, random_training
from torchtrim.step.edits import NOTHING, joined
from torchtrim.step.incremental import Simulation
from torchtrim.step.simulate import simulate, timeline

CASES = [range(start, start + 50) for start in range(0, 5000, 50)]


@pytest.mark.parametrize("cases", draws.some(CASES), ids=str)
def test_any_step_with_any_edits_is_what_the_slow_simulator_says(cases: range) -> None:
    for number in cases:
        rng = random.Random(number)
        step = random_step(rng)
        edits = random_edits(rng, step, 5)[1:]
        found = simulate(step, edits)
        assert found.peak_bytes == peak(step, edits)
        assert (found.task, found.peak_bytes) in moments(step, edits)
        assert found.added_seconds == pytest.approx(sum(e.seconds for e in edits))
        for pool in ("device", "host"):
            before = timeline(step, edits, pool).before
            assert before == [bytes_before(step, edits, i, pool) for i in range(len(step.tasks))]


@pytest.mark.parametrize("cases", draws.some(CASES), ids=str)
def test_switching_options_is_what_the_slow_simulator_says(cases: range) -> None:
    for number in cases:
        rng = random.Random(number)
        if rng.random() < 0.5:
            step = random_step(rng)
            edits = random_edits(rng, step, 6)
        else:
            step, edits = random_training(rng, rng.randrange(1, 8))
        simulation = Simulation(step, edits)
        assert simulation.peak_bytes == peak(step)
        for _ in range(4):
            simulation.switch(rng.sample(range(len(edits)), rng.randrange(len(edits) + 1)))
            on = [edits[i] for i in simulation.on]
            outcome = simulation.outcome
            assert outcome.peak_bytes == simulation.peak_bytes == peak(step, on)
            assert (outcome.task, outcome.peak_bytes) in moments(step, on)
            assert outcome.added_seconds == pytest.approx(sum(e.seconds for e in on))


def test_a_step_without_tasks_has_no_peak() -> None:
    step = random_step(random.Random(0))
    empty = type(step)((), step.tensors)
    assert simulate(empty).task == Simulation(empty, [NOTHING]).outcome.task == -1
    assert simulate(empty).peak_bytes == Simulation(empty, [NOTHING]).peak_bytes == 0


def test_joined_edits_are_all_of_them() -> None:
    rng = random.Random(5)
    step = random_step(rng)
    edits = random_edits(rng, step, 6)
    assert simulate(step, edits).peak_bytes == simulate(step, [joined(edits)]).peak_bytes
