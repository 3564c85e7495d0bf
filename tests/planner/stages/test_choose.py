"""Cuts of chains, beside all ways to cut them."""

from __future__ import annotations

import random

import pytest

import draws
from torchtrim.pipelines.orders import order_of
from torchtrim.planner.stages.chain import Chain, Segment
from torchtrim.planner.stages.choose import (
    PipelineSettings,
    all_cuts,
    balanced_cuts,
    choose,
    improved_cuts,
)
from torchtrim.planner.stages.timing import Link, stages_of, step_seconds
from torchtrim.records.pipeline import SCHEDULES, Schedule

LINK = Link(latency=1e-4, bytes_per_second=1e9)


def chain(seed: int, count: int) -> Chain:
    """Segments of very different lengths, some long alone."""
    made = random.Random(seed)
    segments = []
    for number in range(count):
        forward = made.choice((1e-3, 3e-3, 2e-2)) * made.uniform(0.5, 2)
        backward = forward * made.uniform(1, 3)
        weights = backward * made.uniform(0.2, 0.6)
        segments.append(
            Segment(
                f"layer{number}",
                forward,
                backward - weights,
                weights,
                given=made.randrange(10**6),
                held=made.randrange(10**6),
            )
        )
    return Chain("Net", tuple(segments), 16)


def longest(one: Chain, cuts: tuple[int, ...]) -> float:
    return max(stage.forward + stage.backward for stage in stages_of(one, cuts))


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_no_cut_has_a_shorter_longest_stage(stages: int) -> None:
    for seed in range(draws.count(60)):
        one = chain(seed, 9)
        best = min(longest(one, cuts) for cuts in all_cuts(9, stages))
        assert longest(one, balanced_cuts(one.segments, stages)) == pytest.approx(best)


def test_stages_keep_within_bytes_where_they_can() -> None:
    segments = [Segment(f"l{n}", 1.0 + (n < 2), 0.0, 0.0, state=100 * (n < 4)) for n in range(8)]
    assert balanced_cuts(segments, 2, most_bytes=300) == (3,)
    assert balanced_cuts(segments, 2, most_bytes=200) == (2,)
    assert balanced_cuts(segments, 2) == (3,)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_chosen_cut_is_near_the_best_of_all(schedule: Schedule) -> None:
    single = schedule in ("GPipe", "1F1B")
    for seed in range(draws.count(24)):
        one = chain(1000 + seed, 9 + seed % 4)
        chosen = choose(
            lambda _, one=one: one, PipelineSettings(2, 1, (schedule,), (8,), LINK), None, order_of
        )
        order = order_of(schedule, 2, 2 if single else 4, 8)
        assert order is not None
        best = min(
            step_seconds(stages_of(one, cuts), order, LINK)
            for cuts in all_cuts(len(one.segments), len(order.homes))
        )
        found = step_seconds(chosen.best.stages, order, LINK)
        assert best <= found * (1 + 1e-9)
        assert found <= 1.05 * best, (seed, found / best)


def test_the_search_ends_where_there_are_fewer_ways_than_it_may_try() -> None:
    """17 segments have 560 ways into 4 stages, which random draws need not meet all."""
    one = chain(3, 17)
    best = min(longest(one, cuts) for cuts in all_cuts(17, 4))
    _, found = improved_cuts((4, 8, 12), 17, lambda cuts: longest(one, cuts))
    assert found == best
