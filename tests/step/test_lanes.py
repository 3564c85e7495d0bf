"""Lanes against a slow oracle that raises start times until none changes."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable

import pytest
from tests import draws

from torchtrim.pipelines.orders import order_of
from torchtrim.planner.stages import timing
from torchtrim.planner.stages.chain import Chain, Segment
from torchtrim.records.pipeline import SCHEDULES, Schedule
from torchtrim.step import exchanges, links
from torchtrim.step.lanes import LaneTask, run_lanes

Times = dict[Hashable, tuple[float, float]]


def slow(lanes: Iterable[Iterable[LaneTask]]) -> Times:
    """Start every task at zero, and move each one back until all constraints hold."""
    lanes = [list(lane) for lane in lanes]
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


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_of_a_pipeline_have_the_times_of_the_oracle(
    monkeypatch: pytest.MonkeyPatch, schedule: Schedule
) -> None:
    rng = random.Random(len(schedule))
    ranks, batches = 2, 4
    count = ranks if schedule in ("GPipe", "1F1B") else 2 * ranks
    order = order_of(schedule, ranks, count, batches)
    assert order is not None
    segments = tuple(
        Segment(f"{n}", rng.random(), rng.random(), rng.random(), given=rng.randrange(9))
        for n in range(count)
    )
    stages = timing.stages_of(Chain("Net", segments, batches), range(1, count))
    link = timing.Link(latency=0.1, bytes_per_second=10.0)
    quick = timing.simulate_pipeline(stages, order, batches, link)
    monkeypatch.setattr(timing, "run_lanes", slow)
    assert timing.simulate_pipeline(stages, order, batches, link) == quick


@pytest.mark.parametrize("seed", draws.some(range(100)))
def test_exchanges_and_parts_have_the_times_of_the_oracle(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    ready = sorted((rng.random(), rng.randrange(1, 9)) for _ in range(rng.randint(1, 12)))
    gradients = tuple(exchanges.ReadyGradient(*pair) for pair in ready)
    link = exchanges.ExchangeCost(rng.random() / 10, rng.random() / 10)
    overlap = exchanges.Overlap(gradients, 1.0, rng.randint(1, 20), link)
    parts = [rng.random() for _ in ready]
    quick = overlap.exposed_now(), links.stall_in_parts(parts, parts[::-1])
    monkeypatch.setattr(exchanges, "run_lanes", slow)
    monkeypatch.setattr(links, "run_lanes", slow)
    assert (overlap.exposed_now(), links.stall_in_parts(parts, parts[::-1])) == quick


def test_tasks_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(AssertionError, match="waits for itself"):
        run_lanes([[LaneTask("a", 1.0, (("b", 0.0),))], [LaneTask("b", 1.0, (("a", 0.0),))]])
