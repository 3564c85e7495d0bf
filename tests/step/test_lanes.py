"""Lanes against a slow oracle that raises start times until none changes."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence

import pytest
from tests import draws

from torchtrim.step.lanes import LaneTask, run_lanes

Times = dict[Hashable, tuple[float, float]]


def slow(lanes: Sequence[Sequence[LaneTask]]) -> Times:
    """Start every task at zero, and move each one back until all constraints hold."""
    starts = {task.key: 0.0 for lane in lanes for task in lane}
    seconds = {task.key: task.seconds for lane in lanes for task in lane}
    changed = True
    while changed:
        changed = False
        for lane in lanes:
            for number, task in enumerate(lane):
                bounds = [starts[key] + seconds[key] + gap for key, gap in task.after]
                if number:
                    before = lane[number - 1].key
                    bounds.append(starts[before] + seconds[before])
                wanted = max([task.earliest, *bounds])
                if wanted > starts[task.key]:
                    starts[task.key] = wanted
                    changed = True
    return {key: (start, start + seconds[key]) for key, start in starts.items()}


def drawn(seed: int) -> list[list[LaneTask]]:
    """Tasks on random lanes, each after some with lower numbers, so that none waits forever."""
    rng = random.Random(seed)
    lanes: list[list[LaneTask]] = [[] for _ in range(rng.randint(1, 4))]
    for number in range(rng.randint(0, 20)):
        known = rng.sample(range(number), rng.randint(0, min(number, 3)))
        after = tuple((key, rng.choice((0.0, rng.random()))) for key in known)
        task = LaneTask(
            number, rng.choice((0.0, rng.random())), after, rng.choice((0.0, 3 * rng.random()))
        )
        rng.choice(lanes).append(task)
    return lanes


@pytest.mark.parametrize("seed", draws.some(range(1000)))
def test_times_are_those_of_the_oracle(seed: int) -> None:
    lanes = drawn(seed)
    assert run_lanes(lanes) == slow(lanes)


def test_tasks_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(AssertionError, match="waits for itself"):
        run_lanes([[LaneTask("a", 1.0, (("b", 0.0),))], [LaneTask("b", 1.0, (("a", 0.0),))]])
