"""Stages and an order -> when each rank does what, how long it idles, and its peak."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchtrim.planner.stages.costs import Link, StageCost
from torchtrim.records.pipeline import Action, Order

_Key = tuple[str, int, int]


class StageBar(NamedTuple):
    """An action of a rank, and when: seconds from the start of the step."""

    action: Action
    start: float
    end: float


class Simulated(NamedTuple):
    """A step of a pipeline. `bubble`: the share of all ranks' time until backward is over in which they idle.

    `peaks`: the highest bytes of each rank; `in_flight`: the most micro-batches that each stage holds.
    """

    seconds: float
    bubble: float
    peaks: tuple[int, ...]
    in_flight: tuple[int, ...]
    bars: tuple[tuple[StageBar, ...], ...]


def timed(stages: Sequence[StageCost], order: Order, batches: int, link: Link) -> Simulated:
    """What a step takes and needs. `AssertionError` for an order that would never end."""
    bars = _timed(stages, order, link)
    end = max(bar.end for line in bars for bar in line)
    busy = sum(bar.end - bar.start for line in bars for bar in line)
    updates = [
        sum(stages[stage].update for stage, home in enumerate(order.homes) if home == rank)
        for rank in range(len(order.ranks))
    ]
    return Simulated(
        end + max(updates),
        max(0.0, 1 - busy / (end * len(bars))) if end else 0.0,
        tuple(rank_peak(stages, order, rank, batches) for rank in range(len(order.ranks))),
        in_flight(order),
        bars,
    )


def step_seconds(stages: Sequence[StageCost], order: Order, link: Link) -> float:
    """What forward and backward of a step take."""
    return max(bar.end for line in _timed(stages, order, link) for bar in line)


def _timed(
    stages: Sequence[StageCost], order: Order, link: Link
) -> tuple[tuple[StageBar, ...], ...]:
    """Let each rank do its actions in order, each once what it needs is there."""
    done: dict[_Key, float] = {}
    free = [0.0] * len(order.ranks)
    left = [deque(actions) for actions in order.ranks]
    bars: list[list[StageBar]] = [[] for _ in order.ranks]
    while any(left):
        moved = False
        for rank, actions in enumerate(left):
            while actions and (ready := _ready(actions[0], stages, order, done, link)) is not None:
                action = actions.popleft()
                start = max(ready, free[rank])
                free[rank] = start + _seconds(action, stages[action.stage])
                done[_key(action)] = free[rank]
                bars[rank].append(StageBar(action, start, free[rank]))
                moved = True
        assert moved, "the order waits for itself"
    return tuple(map(tuple, bars))


def _key(action: Action) -> _Key:
    return ("I" if action.kind == "B" else action.kind), action.stage, action.batch


def _seconds(action: Action, stage: StageCost) -> float:
    return {
        "F": stage.forward,
        "B": stage.backward,
        "I": stage.inputs,
        "W": stage.weights,
    }[action.kind]


def _ready(
    action: Action,
    stages: Sequence[StageCost],
    order: Order,
    done: dict[_Key, float],
    link: Link,
) -> float | None:
    """When all that the action needs is there; None while that is not known."""
    kind, stage, batch = action
    if kind == "W":
        return done.get(("I", stage, batch))
    if kind == "F":
        if stage == 0:
            return 0.0
        return _received(done.get(("F", stage - 1, batch)), stage, stage - 1, stages, order, link)
    if stage == len(stages) - 1:
        return done.get(("F", stage, batch))
    return _received(done.get(("I", stage + 1, batch)), stage, stage + 1, stages, order, link)


def _received(
    sent: float | None,
    stage: int,
    other: int,
    stages: Sequence[StageCost],
    order: Order,
    link: Link,
) -> float | None:
    if sent is None or order.homes[stage] == order.homes[other]:
        return sent
    return sent + link.seconds(stages[max(stage, other)].given)


def in_flight(order: Order) -> tuple[int, ...]:
    """The most micro-batches that each stage holds at once: forward is done, backward is not over."""
    most = [0] * len(order.homes)
    now = [0] * len(order.homes)
    for actions in order.ranks:
        for kind, stage, _ in actions:
            now[stage] += {"F": 1, "B": -1, "W": -1, "I": 0}[kind]
            most[stage] = max(most[stage], now[stage])
    return tuple(most)


def rank_peak(stages: Sequence[StageCost], order: Order, rank: int, batches: int) -> int:
    """The highest bytes of a rank: what is there always, buffers to receive, and its stages' activations."""
    own = [stages[stage] for stage, home in enumerate(order.homes) if home == rank]
    always = sum(one.state + batches * (one.given + one.passed) for one in own)
    return always + step_rise(stages, order, rank)


def step_rise(stages: Sequence[StageCost], order: Order, rank: int) -> int:
    """The highest bytes of a rank over those with which a step begins."""
    return max(_levels(stages, order, rank))


def _levels(stages: Sequence[StageCost], order: Order, rank: int) -> Iterator[int]:
    """The highest bytes during each action.

    Torch's schedules keep what they have sent until the step is over. What a stage hands on to one of its own
    rank stays until the next step hands on another in its place, so a step begins with that of the one
    before, forward and backward. A stage's first backward makes its gradients.
    """
    now = 0
    grown: set[int] = set()
    for kind, stage, _ in order.ranks[rank]:
        one = stages[stage]
        if kind == "F":
            yield now + one.rise
            now += one.held
            if stage + 1 < len(stages) and order.homes[stage + 1] == rank:
                now -= one.passed
            continue
        ends = kind in "BW"
        waiting = one.waiting if kind == "W" else 0
        new = ends and stage not in grown
        yield now + _above(one, kind, stage, new)
        if new:
            grown.add(stage)
            now += one.gradients
        if kind in "BI" and stage and order.homes[stage - 1] != rank:
            now += one.given
        if kind == "I":
            now += one.waiting
        elif ends:
            now -= one.held + waiting - one.passed


def _above(one: StageCost, kind: str, stage: int, new: bool) -> int:
    """How far a backward rises over what was held before it.

    Backward to the inputs lets go of nothing, and keeps what backward to the weights will read; the first
    stage leaves all to that.
    """
    rises = (one.first if new else one.back) - one.held
    if kind == "B" or (kind == "W" and not stage):
        return rises
    if kind == "I":
        return one.split
    return max(0, one.gradients - one.held - one.waiting) if new else 0
