from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

import draws
from torchtrim.capture.steps import Steps

Segments = list[tuple[int, ...]]


def boundaries(steps: Steps, segments: Segments) -> list[int]:
    """After how many segments each new step begins."""
    found = []
    for number, segment in enumerate(segments, 1):
        for optimizer in segment:
            steps.stepped(optimizer)
        if steps.forward():
            found.append(number)
    return found


def test_with_one_optimizer_each_forward_after_it_begins_a_step() -> None:
    assert boundaries(Steps(1), [(0,)] * 4) == [1, 2, 3, 4]


def test_micro_batches_belong_to_the_step_of_their_optimizer() -> None:
    steps = Steps(1)
    begun = []
    for _ in range(3):
        begun += [steps.forward() for _ in range(4)]
        steps.stepped(0)
    assert begun == [False] * 4 + [True, False, False, False] * 2


def test_a_gan_that_alternates_is_one_step_of_two_optimizers() -> None:
    assert boundaries(Steps(2), [(0,), (1,)] * 4) == [4, 6, 8]


def test_five_steps_of_the_critic_and_one_of_the_generator_are_one() -> None:
    critic = [(0,)] * 5 + [(1,)]
    assert boundaries(Steps(2), critic * 4) == [12, 18, 24]


def test_two_optimizers_in_one_segment_are_known_at_once() -> None:
    assert boundaries(Steps(2), [(0, 1)] * 3) == [1, 2, 3]


def test_an_optimizer_that_never_steps_is_not_waited_for_for_long() -> None:
    assert boundaries(Steps(2), [(0,)] * 19) == [16, 17, 18, 19]


def test_a_cycle_that_seemed_shorter_is_learnt_in_the_end() -> None:
    critic = [(0,)] * 20 + [(1,)]
    found = boundaries(Steps(2), critic * 8)
    assert found[-3:] == [6 * 21, 7 * 21, 8 * 21]


def test_one_odd_segment_does_not_lose_the_cycle() -> None:
    found = boundaries(Steps(2), [(0,), (1,)] * 4 + [(0, 0)] + [(0,), (1,)] * 6)
    assert [b - a for a, b in pairwise(found)][-3:] == [2, 2, 2]
    assert (found[-1] - 9) % 2 == 0


def test_optimizers_without_a_cycle_still_have_steps() -> None:
    digits = [int(digit) for digit in f"{3**400:b}"]
    found = boundaries(Steps(2), [(digit,) for digit in digits])
    assert len(found) >= len(digits) // 100


def in_backward(steps: Steps, segments: Segments) -> list[int]:
    found = []
    for number, segment in enumerate(segments, 1):
        for optimizer in segment:
            steps.stepped(optimizer, in_backward=True)
        if steps.forward():
            found.append(number)
    return found


def test_optimizers_that_step_in_one_backward_are_one() -> None:
    """A module at random depth takes no part in some steps."""
    segments = [(0, 3), (0, 1, 3), (3,), (2, 0, 3), (0, 3), (1, 3), (3, 0)]
    assert in_backward(Steps(4), segments) == [4, 5, 6, 7]


def test_networks_that_alternate_in_backward_stay_two() -> None:
    assert in_backward(Steps(4), [(0, 1), (2, 3)] * 4) == [4, 6, 8]


def test_evaluation_does_not_begin_a_step() -> None:
    steps = Steps(1)
    steps.stepped(0)
    assert steps.dirty
    assert steps.forward()
    assert not steps.dirty
    assert not steps.forward()


def shortest_period(segments: Segments) -> int:
    return next(
        period
        for period in range(1, len(segments) + 1)
        if all(segments[i] == segments[i % period] for i in range(len(segments)))
    )


SEGMENT = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple)


@given(st.lists(SEGMENT, min_size=1, max_size=9), st.integers(0, 1))
@settings(max_examples=draws.count(300), deadline=None)
def test_after_learning_the_steps_are_exactly_one_period_apart(cycle: Segments, idle: int) -> None:
    segments = cycle * 40
    optimizers = len({optimizer for segment in cycle for optimizer in segment})
    found = boundaries(Steps(optimizers + idle), segments)
    period = shortest_period(segments)
    late = [number for number in found if number > len(segments) // 2]
    assert {b - a for a, b in pairwise(late)} == {period}


def test_optimizers_that_stepped_once_and_never_again_are_not_waited_for_for_ever() -> None:
    before, loop = [(0, 0, 1), (0,), (2,)], [(3,)] * 20
    assert boundaries(Steps(4), before + loop)[-4:] == [20, 21, 22, 23]
