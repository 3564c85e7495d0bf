"""The steps of several ranks on one clock."""

from __future__ import annotations

import pytest

from profiles import Step
from torchtrim.records.profile import Profile
from torchtrim.step.job import blocked_seconds, job_of


def rank(number: int, late: float = 0.0, under_way: float = 0.2, clock: float = 0.0) -> Profile:
    """A second of forward, an exchange, 0.1 s of work beside it, and the rest after it was waited for."""
    step = Step()
    step.idle(late)
    step.op("aten::mm", seconds=1.0, line=3)
    step.exchange(400, under_way, line=4)
    step.op("aten::mm", seconds=0.1, phase="backward", line=5)
    step.idle(max(under_way - 0.1, 0.0))
    step.op("aten::add_", seconds=0.1, phase="optimizer", line=6)
    return step.profile(rank=number, clock=clock)


def test_a_rank_is_blocked_after_its_own_work() -> None:
    assert blocked_seconds(rank(0)) == pytest.approx([0.1])


def test_what_is_over_before_the_work_beside_it_blocks_nobody() -> None:
    assert blocked_seconds(rank(0, under_way=0.05)) == [0.0]


@pytest.mark.parametrize(("noted", "blocked"), [(0.0, 3.0), (0.015, 3.0), (0.2, 0.0)])
def test_an_end_that_is_noted_when_the_rank_goes_on_already(noted: float, blocked: float) -> None:
    step = Step()
    step.exchange(400, 3.0 + noted)
    step.idle(3.0)
    step.op("aten::add_", seconds=1.0, phase="optimizer")
    assert blocked_seconds(step.profile()) == pytest.approx([blocked])


def test_a_wait_after_the_last_operator_counts() -> None:
    step = Step()
    step.op("aten::mm", seconds=1.0)
    step.exchange(400, 0.3)
    assert blocked_seconds(step.profile()) == pytest.approx([0.3])


def test_two_that_are_waited_for_together_share_the_wait() -> None:
    step = Step()
    step.op("aten::mm", seconds=1.0)
    step.exchange(400, 0.3)
    step.exchange(400, 0.5)
    assert blocked_seconds(step.profile()) == pytest.approx([0.3, 0.2])


def test_no_operator_and_no_collective() -> None:
    assert blocked_seconds(Step().profile()) == []
    assert job_of([Step().profile()]).exchanges == ()


def test_the_rank_that_comes_last_is_waited_for() -> None:
    job = job_of([rank(1, late=0.5), rank(0, under_way=0.7)])
    (exchange,) = job.exchanges
    assert [profile.rank for profile in job.profiles] == [0, 1]
    assert (exchange.last.rank, exchange.bytes, exchange.name) == (1, 400, "allreduce")
    first, last = exchange.parts
    assert exchange.waited(first) == pytest.approx(0.5)
    assert exchange.waited(last) == 0
    assert first.blocked - exchange.waited(first) == pytest.approx(0.1)


def test_steps_that_begin_at_another_time_are_put_on_one_clock() -> None:
    job = job_of([rank(0, under_way=0.7, clock=10.0), rank(1, clock=10.5)])
    assert job.begins == pytest.approx((0.0, 0.5))
    assert job.exchanges[0].waited(job.exchanges[0].parts[0]) == pytest.approx(0.5)


def test_a_collective_that_only_one_rank_has_is_of_no_exchange() -> None:
    more = Step()
    more.op("aten::mm", seconds=1.0)
    more.exchange(400, 0.2)
    more.exchange(400, 0.2, group="1")
    job = job_of([rank(0), more.profile(rank=1)])
    assert {exchange.group for exchange in job.exchanges if len(exchange.parts) > 1} == {"0"}
