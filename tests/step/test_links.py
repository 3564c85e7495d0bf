"""Trips to the host on one link: copies queue, and what one is awaited for is time that others have."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

import draws
from torchtrim.step.edits import Edit, Insert, Trip
from torchtrim.step.links import added_seconds, stall_in_parts, traffic
from torchtrim.step.step import Step, Task


def step_of(*seconds: float) -> Step:
    tasks = (Task("op", "forward", -1, (), (), (), 0, took) for took in seconds)
    return Step(tuple(tasks), ())


def trip(seconds: float, leaves: int, gone: int, back: int, asked: int) -> Trip:
    return Trip(100, seconds, leaves, gone, back, asked, 0.0, 0.0)


def test_a_copy_that_has_its_time_is_not_awaited() -> None:
    step = step_of(*[1.0] * 10)
    found = traffic(step, [Edit(trips=(trip(2.0, 1, 3, 6, 8),))])
    assert [(one.way, one.start, one.end, one.stall) for one in found.copies] == [
        ("out", 1.0, 3.0, 0.0),
        ("home", 6.0, 8.0, 0.0),
    ]
    assert found.delays == ()


def test_copies_queue_on_their_lane() -> None:
    """Each alone has its time; together the second waits for the first, and compute for it."""
    step = step_of(*[1.0] * 10)
    edits = [Edit(trips=(trip(2.0, 1, 3, 6, 8),)), Edit(trips=(trip(2.0, 1, 3, 6, 8),))]
    found = traffic(step, edits)
    assert [one.stall for one in found.copies] == [0.0, 2.0, 0.0, 2.0]
    assert found.stall == 4.0
    assert added_seconds(step, edits) == 4.0
    assert found.delays == ((3, 2.0), (8, 4.0))


def test_the_lanes_of_both_directions_are_apart() -> None:
    step = step_of(*[1.0] * 10)
    edits = [Edit(trips=(trip(2.0, 1, 3, 4, 6),)), Edit(trips=(trip(2.0, 4, 6, 7, 9),))]
    assert traffic(step, edits).stall == 0.0


def test_what_compute_stands_still_for_one_copy_the_next_has() -> None:
    step = step_of(*[1.0] * 10)
    edits = [Edit(trips=(trip(3.0, 1, 2, 8, 10),)), Edit(trips=(trip(3.0, 1, 6, 8, 10),))]
    found = traffic(step, edits)
    assert [one.stall for one in found.copies if one.way == "out"] == [2.0, 0.0]


def test_work_that_is_inserted_gives_a_copy_time() -> None:
    step = step_of(*[1.0] * 10)
    edits = [Edit(trips=(trip(4.0, 1, 3, 5, 9),)), Edit(inserts=(Insert(2, 2.0, 0),))]
    assert traffic(step, edits[:1]).stall == 2.0
    assert traffic(step, edits).stall == 0.0
    assert added_seconds(step, edits) == 2.0


def test_a_tensor_comes_back_when_it_has_gone() -> None:
    """However soon it is fetched."""
    step = step_of(*[0.0] * 10)
    found = traffic(step, [Edit(trips=(trip(2.0, 1, 9, 1, 3),))])
    home = next(one for one in found.copies if one.way == "home")
    assert (home.start, home.end, home.stall) == (2.0, 4.0, 4.0)


def test_together_they_add_no_less_than_their_work_and_no_more_than_one_after_the_other() -> None:
    rng = random.Random(draws.seed())
    for _ in range(draws.count(300)):
        step = step_of(*(rng.random() for _ in range(12)))
        trips = []
        for _ in range(rng.randint(1, 6)):
            moments = sorted(rng.sample(range(1, 12), 4))
            trips.append(trip(rng.random() * 3, *moments))
        found = traffic(step, [Edit(trips=(one,)) for one in trips])
        assert 0.0 <= found.stall <= sum(2 * one.seconds for one in trips) + 1e-9
        for way in ("out", "home"):
            lane = [one for one in found.copies if one.way == way]
            for before, after in pairwise(lane):
                assert after.start >= before.end


def test_parts_of_an_optimizer_come_one_ahead() -> None:
    assert stall_in_parts([], []) == 0.0
    assert stall_in_parts([1.0], [5.0]) == 2.0
    assert stall_in_parts([1.0, 1.0], [5.0, 5.0]) == pytest.approx(3.0)
    assert stall_in_parts([2.0, 2.0], [0.0, 0.0]) == pytest.approx(6.0)
