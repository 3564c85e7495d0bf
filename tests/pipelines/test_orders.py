"""Orders of torch's schedules, beside the orders that torch has made itself."""

from __future__ import annotations

import itertools

import pytest

from torchtrim.pipelines.orders import CLASSES, _Outline, homes_of, order_of
from torchtrim.planner.stages.timing import in_flight
from torchtrim.records.pipeline import SCHEDULES, Schedule

RANKS, MICROBATCHES = (2, 3, 4, 8), (2, 4, 6, 8, 16, 64)


def stages_of(schedule: Schedule, ranks: int) -> int:
    return ranks if schedule in ("GPipe", "1F1B") else 2 * ranks


def own_in_flight(schedule: Schedule, ranks: int, stages: int, batches: int) -> list[int]:
    """The most that torch's own `pipeline_order` has under way of each stage, read afresh."""
    homes = homes_of(schedule, ranks, stages)
    own = [_Outline(stage, stages, ranks) for stage in range(stages) if homes[stage] == 0]
    made = CLASSES[schedule](own if len(own) > 1 else own[0], batches)
    most = [0] * stages
    for actions in made.pipeline_order.values():
        now = [0] * stages
        for action in filter(None, actions):
            for one in action.sub_actions or (action,):
                name = one.computation_type.value
                now[one.stage_index] += {"F": 1, "B": -1, "W": -1}.get(name, 0)
                most[one.stage_index] = max(most[one.stage_index], now[one.stage_index])
    return most


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_in_flight_microbatches_are_torchs_own(schedule: Schedule) -> None:
    compared = 0
    for ranks, batches in itertools.product(RANKS, MICROBATCHES):
        stages = stages_of(schedule, ranks)
        order = order_of(schedule, ranks, stages, batches)
        if order is not None:
            assert list(in_flight(order)) == own_in_flight(schedule, ranks, stages, batches)
            compared += 1
    assert compared >= 8


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_are_added_up_in_one_order_on_all_stages(schedule: Schedule) -> None:
    for ranks, batches in itertools.product(RANKS, MICROBATCHES):
        order = order_of(schedule, ranks, stages_of(schedule, ranks), batches)
        if order is not None:
            expected = range(batches)
            turned = reversed(expected) if schedule == "LoopedBFS" else expected
            assert order.backwards() == tuple(turned)


def test_there_is_no_order_for_numbers_that_torch_refuses() -> None:
    assert order_of("1F1B", 4, 4, 3) is None
    assert order_of("DualPipeV", 4, 8, 4) is None
    assert order_of("ZBVZeroBubble", 2, 6, 4) is None
    assert order_of("GPipe", 2, 4, 4) is None
    assert order_of("Interleaved1F1B", 4, 6, 4) is None
