"""What a stage of several segments costs."""

from __future__ import annotations

import pytest

from torchtrim.planner.stages.chain import Segment
from torchtrim.planner.stages.costs import stage_of

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
