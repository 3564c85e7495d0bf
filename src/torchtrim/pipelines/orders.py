"""Reads the order of actions from torch's pipeline schedules."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from torchtrim.records.pipeline import Action, Order, Schedule

CLASSES: dict[str, Any] = {
    "GPipe": pipelining.ScheduleGPipe,
    "1F1B": pipelining.Schedule1F1B,
    "LoopedBFS": pipelining.ScheduleLoopedBFS,
    "Interleaved1F1B": pipelining.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": pipelining.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": pipelining.ScheduleZBVZeroBubble,
    "DualPipeV": pipelining.ScheduleDualPipeV,
}
SINGLE = ("GPipe", "1F1B")  # schedules with exactly one stage per rank
_VEES = ("ZBVZeroBubble", "DualPipeV")


def homes_of(schedule: Schedule, ranks: int, stages: int) -> tuple[int, ...]:
    """Return the rank of each stage."""
    style = "v" if schedule in _VEES else "loop"
    mapping = generate_stage_to_rank_mapping(ranks, stages, style)
    return tuple(mapping[stage] for stage in range(stages))


@functools.lru_cache(maxsize=512)
def order_of(schedule: Schedule, ranks: int, stages: int, microbatches: int) -> Order | None:
    """Return each rank's actions in torch's schedule, or None if torch has none for these sizes."""
    if stages % ranks or (schedule in SINGLE) != (stages == ranks):
        return None
    homes = homes_of(schedule, ranks, stages)
    own = [_Outline(stage, stages, ranks) for stage in range(stages) if homes[stage] == 0]
    try:
        made = CLASSES[schedule](own[0] if schedule in SINGLE else own, microbatches)
    except (ValueError, AssertionError):
        return None
    if schedule == "1F1B":
        # Its own `pipeline_order` renumbers the forwards.
        ranked = (_one_forward_one_backward(rank, stages, microbatches) for rank in range(stages))
        return Order(tuple(map(tuple, ranked)), homes)
    lines = made.pipeline_order
    order = Order(tuple(tuple(_read(lines[rank])) for rank in range(ranks)), homes)
    return order if _is_whole(order, microbatches) else None


class _Outline(SimpleNamespace):
    """A stand-in for a stage with the attributes that a schedule reads to build its order."""

    def __init__(self, stage: int, stages: int, ranks: int) -> None:
        super().__init__(
            stage_index=stage,
            num_stages=stages,
            group_size=ranks,
            group_rank=0,
            submod=nn.Identity(),
            is_first=stage == 0,
            is_last=stage == stages - 1,
            stage_index_to_group_rank={},
        )


def _read(actions: Any) -> Iterator[Action]:
    for action in actions:
        if action is None:
            continue
        if action.sub_actions is not None:
            yield from _read(action.sub_actions)
        elif action.computation_type.value in "FBIW":
            yield Action(action.computation_type.value, action.stage_index, action.microbatch_index)


def _one_forward_one_backward(rank: int, stages: int, microbatches: int) -> Iterator[Action]:
    ahead = min(microbatches, stages - rank)
    for batch in range(ahead):
        yield Action("F", rank, batch)
    for batch in range(microbatches):
        yield Action("B", rank, batch)
        if ahead + batch < microbatches:
            yield Action("F", rank, ahead + batch)


def _is_whole(order: Order, microbatches: int) -> bool:
    """Return True if each micro-batch runs forward and backward once in each stage."""
    done = [action for actions in order.ranks for action in actions]
    if len(done) != len(set(done)):
        return False
    forwards = {action[1:] for action in done if action.kind == "F"}
    inputs = {action[1:] for action in done if action.kind in "BI"}
    weights = {action[1:] for action in done if action.kind in "BW"}
    return forwards == inputs == weights and len(forwards) == len(order.homes) * microbatches


logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.WARNING)
