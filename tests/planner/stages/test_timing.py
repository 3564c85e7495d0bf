"""Simulated pipelines, where it is known what comes out."""

from __future__ import annotations

from typing import Literal

import pytest

from torchtrim.errors import InfeasibleBudget, Unsupported
from torchtrim.pipelines.orders import order_of
from torchtrim.planner.stages.chain import Chain, Segment
from torchtrim.planner.stages.choose import PipelineSettings, choose, choose_clocked
from torchtrim.planner.stages.timing import (
    Link,
    StageCost,
    rank_peak,
    simulate_pipeline,
    stage_of,
    stages_of,
    step_rise,
)
from torchtrim.records.pipeline import Action, Order, Schedule, StageSeconds

FREE = Link(latency=0.0, bytes_per_second=float("inf"))


def even(stages: int) -> tuple[StageCost, ...]:
    """Forward takes 1, each half of backward 1; 10 bytes are held."""
    one = Segment("a", 1.0, 1.0, 1.0, held=10, rise=12, back=14, first=14)
    return tuple(stages_of(Chain("Net", (one,) * stages, 64), range(1, stages)))


def known(schedule: Schedule, ranks: int, stages: int, batches: int) -> Order:
    order = order_of(schedule, ranks, stages, batches)
    assert order is not None
    return order


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("batches", [8, 16])
def test_the_bubble_of_a_plain_pipeline_is_as_in_the_paper(ranks: int, batches: int) -> None:
    """GPipe and 1F1B: (S - 1) / (M + S - 1) of the time; arXiv:1811.06965 and 1806.03377."""
    for schedule in ("GPipe", "1F1B"):
        found = simulate_pipeline(
            even(ranks), known(schedule, ranks, ranks, batches), batches, FREE
        )
        assert found.seconds == pytest.approx(3 * (batches + ranks - 1))
        assert found.bubble == pytest.approx((ranks - 1) / (batches + ranks - 1))


def test_interleaving_makes_the_bubble_smaller_and_splitting_backward_smaller_still() -> None:
    """Two stages a rank halve the bubble, arXiv:2104.04473; zero bubble needs less, arXiv:2401.10241."""
    plain = simulate_pipeline(even(4), known("1F1B", 4, 4, 16), 16, FREE)
    looped = simulate_pipeline(even(8), known("Interleaved1F1B", 4, 8, 16), 16, FREE)
    zero = simulate_pipeline(even(8), known("ZBVZeroBubble", 4, 8, 16), 16, FREE)
    assert looped.bubble < 0.65 * plain.bubble
    assert zero.bubble < looped.bubble


def test_peaks_count_what_is_in_flight() -> None:
    stages, order = even(4), known("1F1B", 4, 4, 8)
    # Rank 0 holds 4 micro-batches, and backward of one rises by 4 above its 10.
    assert [rank_peak(stages, order, rank, 8) for rank in range(4)] == [44, 34, 24, 14]
    order = known("GPipe", 4, 4, 8)
    assert rank_peak(stages, order, 0, 8) == 84


@pytest.mark.parametrize("batches", [1, 2, 5])
def test_what_goes_from_stage_to_stage_of_a_rank_takes_the_place_of_the_last_steps(
    batches: int,
) -> None:
    """Each micro-batch ends as it began: 10 - 4 are held after the first stage, 10 more after the second."""
    first = Segment("a", 1.0, 1.0, 1.0, held=10, rise=10, back=10, first=10)
    stages = stages_of(Chain("Net", (first, first._replace(given=4)), 8), (1,))
    once: tuple[tuple[Literal["F", "B"], int], ...] = (("F", 0), ("F", 1), ("B", 1), ("B", 0))
    line = tuple(Action(kind, stage, batch) for batch in range(batches) for kind, stage in once)
    assert step_rise(stages, Order((line,), (0, 0)), 0) == 16
    assert rank_peak(stages, Order((line,), (0, 0)), 0, batches) == 16 + 8 * batches


def test_sending_takes_time_between_ranks_alone() -> None:
    one = Segment("a", 1.0, 1.0, 1.0, given=100)
    stages = stages_of(Chain("Net", (one, one, one, one), 8), (1, 2, 3))
    slow = Link(latency=0.0, bytes_per_second=100.0)
    loop = simulate_pipeline(stages, known("LoopedBFS", 2, 4, 2), 2, FREE).seconds
    assert simulate_pipeline(stages, known("LoopedBFS", 2, 4, 2), 2, slow).seconds > loop
    vee = known("ZBVZeroBubble", 2, 4, 4)
    bars = simulate_pipeline(stages, vee, 4, slow).bars
    ends = {bar.action[:3]: bar for line in bars for bar in line}
    assert ends["F", 2, 0].start == ends["F", 1, 0].end


def held(count: int) -> Chain:
    one = Segment("a", 1.0, 1.0, 1.0, held=1000, rise=1000, back=1000, first=1000, state=10)
    return Chain("Net", (one,) * count, 16)


def test_a_budget_is_met_by_recomputing_or_said_to_be_out_of_reach() -> None:
    loose = choose(lambda _: held(4), PipelineSettings(2, 1, ("GPipe",), (4,)), None, order_of)
    assert not any(stage.recompute for stage in loose.pipeline.stages)
    tight = choose(lambda _: held(4), PipelineSettings(2, 1, ("GPipe",), (4,)), 5000, order_of)
    assert all(stage.recompute for stage in tight.pipeline.stages)
    assert tight.best.peak <= 5000
    assert tight.pipeline.seconds > loose.pipeline.seconds
    with pytest.raises(InfeasibleBudget, match="more --memory or more --stages"):
        choose(lambda _: held(4), PipelineSettings(2, 1, ("GPipe",), (4,)), 1500, order_of)


@pytest.mark.parametrize(("half", "first"), [(1.0, "ZBVZeroBubble"), (1.6, "Interleaved1F1B")])
def test_what_a_split_backward_was_clocked_at_sets_the_order(half: float, first: str) -> None:
    """Where both halves together cost more than a whole backward, a filled bubble is not worth it."""
    ways = PipelineSettings(2, 1, ("Interleaved1F1B", "ZBVZeroBubble"), (8,))
    before = choose(lambda _: held(4), ways, None, order_of)
    assert before.best.schedule == "ZBVZeroBubble"
    assert len(before.shortlist) == len(before.others) == 2
    one = StageSeconds(forward=1.0, backward=2.0, inputs=half, weights=half)
    found = choose_clocked(before, [(one,) * 4] * 2, ways)
    assert found.best.schedule == found.pipeline.schedule == first
    assert found.pipeline.peaks == found.best.simulated.peaks


def test_too_few_places_and_batches_that_do_not_divide_say_so() -> None:
    with pytest.raises(Unsupported, match="at most 2 stages"):
        choose(lambda _: held(2), PipelineSettings(4), None, order_of)
    with pytest.raises(Unsupported, match="another batch size"):
        choose(lambda _: held(4), PipelineSettings(2, 3), None, order_of)


FIRST = Segment("a", 1.0, 1.0, 1.0)


@pytest.mark.parametrize(("given", "highest"), [(40, 7 + 40 + 8), (0, 7 + 8)])
def test_backward_to_the_inputs_rises_over_all_that_waits_after_it(
    given: int, highest: int
) -> None:
    """The first of the two runs while what the second keeps is there, and the gradient between them."""
    segments = (
        FIRST,
        Segment("b", 1.0, 1.0, 1.0, given=100, waiting=5, split=8),
        Segment("c", 1.0, 1.0, 1.0, given=given, waiting=7, split=9),
    )
    stage = stage_of(segments, 1, 3, again=False)
    assert (stage.waiting, stage.split) == (12, highest)


def test_what_waits_is_there_at_the_end_at_least() -> None:
    segments = (FIRST, *(Segment("b", 1.0, 1.0, 1.0, waiting=5, split=2) for _ in range(2)))
    assert stage_of(segments, 1, 3, again=False).split == 10


def test_a_first_stage_has_no_backward_to_the_inputs() -> None:
    segments = (FIRST._replace(waiting=5, split=8),)
    stage = stage_of(segments, 0, 1, again=False)
    assert (stage.waiting, stage.split, stage.inputs, stage.weights) == (0, 0, 0.0, 2.0)
