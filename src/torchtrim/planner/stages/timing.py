"""Stages and an order -> the start of each action of each rank, idle times, and peaks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from torchtrim.planner.stages.chain import Chain, Segment
from torchtrim.records.pipeline import Action, Order
from torchtrim.step.lanes import LaneTask, run_lanes


class Link(NamedTuple):
    """Cost of sending a tensor to another rank."""

    latency: float = 1e-4
    bytes_per_second: float = 2e9

    def seconds(self, size: int) -> float:
        """Return the seconds for `size` bytes."""
        return self.latency + size / self.bytes_per_second


class StageCost(NamedTuple):
    """Costs of a stage for one micro-batch.

    Seconds: `forward`, the whole `backward`, backward to the `inputs` and to the `weights`, `update` of the
    parameters. Bytes: `held` in flight; `rise`, `back` and `first`, the highest in forward, in backward, and
    in the first backward, which allocates gradients, `held` included; `waiting`, extra bytes between the two
    halves of backward; `split`, the rise above `held` in the first half; `given` and `passed`, the received
    and the sent tensor; `gradients` and `state`.
    """

    where: str
    forward: float
    backward: float
    inputs: float
    weights: float
    update: float
    held: int
    rise: int
    back: int
    first: int
    waiting: int
    split: int
    given: int
    passed: int
    gradients: int
    state: int
    recompute: bool = False

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def stages_of(chain: Chain, cuts: Sequence[int], again: Sequence[int] = ()) -> list[StageCost]:
    """Return the stages of a chain that is cut before these segments; those in `again` recompute."""
    edges = [0, *cuts, len(chain.segments)]
    return [
        stage_of(chain.segments, first, last, again=number in again)
        for number, (first, last) in enumerate(pairwise(edges))
    ]


def stage_of(segments: Sequence[Segment], first: int, last: int, *, again: bool) -> StageCost:
    """Return the stage of segments `first <= i < last`."""
    own = segments[first:last]
    forward = sum(segment.forward for segment in own)
    inputs, weights = (
        sum(segment.inputs for segment in own),
        sum(segment.weights for segment in own),
    )
    held, rise, back, new = _stage_bytes(own)
    passed = segments[last].given if last < len(segments) else 0
    return StageCost(
        where=own[0].where,
        forward=forward,
        backward=inputs + weights + (forward if again else 0.0),
        inputs=inputs if first else 0.0,
        weights=weights if first else inputs + weights,
        update=sum(segment.update for segment in own),
        held=passed if again else held,
        rise=rise,
        back=back,
        first=new,
        waiting=sum(segment.waiting for segment in own) if first else 0,
        split=_inputs_rise(own) if first else 0,
        given=own[0].given,
        passed=passed,
        gradients=sum(segment.gradients for segment in own),
        state=sum(segment.state for segment in own),
        recompute=again,
    )


def _inputs_rise(own: Sequence[Segment]) -> int:
    """Return the rise above the held bytes in backward to the inputs."""
    most = waiting = follows = 0
    for segment in reversed(own):
        most = max(most, waiting + follows + segment.split)
        waiting += segment.waiting
        follows = segment.given
    return max(most, waiting)


def _stage_bytes(own: Sequence[Segment]) -> tuple[int, int, int, int]:
    """Return the held bytes, and the highest in forward, in backward, and in the first backward."""
    held = rise = back = new = 0
    for number, segment in enumerate(own, 1):
        follows = own[number].given if number < len(own) else 0
        grown = sum(later.gradients for later in own[number:])
        rise = max(rise, held + segment.rise)
        back = max(back, held + segment.back + follows)
        new = max(new, held + segment.first + follows + grown)
        held += segment.held
    sent = own[-1].sent
    return held + sent, max(rise, held + sent), back + sent, new + sent


class StageBar(NamedTuple):
    """An action of a rank, with its times in seconds from the start of the step."""

    action: Action
    start: float
    end: float


class SimulatedPipeline(NamedTuple):
    """A step of a pipeline. `bubble`: the idle share of all ranks' time until the end of backward.

    `peaks`: the highest bytes of each rank. `in_flight`: the most micro-batches that each stage holds.
    """

    seconds: float
    bubble: float
    peaks: tuple[int, ...]
    in_flight: tuple[int, ...]
    bars: tuple[tuple[StageBar, ...], ...]


def simulate_pipeline(
    stages: Sequence[StageCost], order: Order, batches: int, link: Link
) -> SimulatedPipeline:
    """Return the time and memory of a step. Raises `AssertionError` for an order that would never end."""
    bars = _schedule_bars(stages, order, link)
    end = max(bar.end for line in bars for bar in line)
    busy = sum(bar.end - bar.start for line in bars for bar in line)
    updates = [
        sum(stages[stage].update for stage, home in enumerate(order.homes) if home == rank)
        for rank in range(len(order.ranks))
    ]
    return SimulatedPipeline(
        end + max(updates),
        max(0.0, 1 - busy / (end * len(bars))) if end else 0.0,
        tuple(rank_peak(stages, order, rank, batches) for rank in range(len(order.ranks))),
        in_flight(order),
        bars,
    )


def step_seconds(stages: Sequence[StageCost], order: Order, link: Link) -> float:
    """Return the time of forward and backward of a step."""
    return max(bar.end for line in _schedule_bars(stages, order, link) for bar in line)


def _schedule_bars(
    stages: Sequence[StageCost], order: Order, link: Link
) -> tuple[tuple[StageBar, ...], ...]:
    """Run each rank's actions in order, each after its inputs are ready."""
    times = run_lanes(
        [_lane_task(action, stages, order, link) for action in actions] for actions in order.ranks
    )
    return tuple(
        tuple(StageBar(action, *times[_key(action)]) for action in actions)
        for actions in order.ranks
    )


def _key(action: Action) -> tuple[str, int, int]:
    return ("I" if action.kind == "B" else action.kind), action.stage, action.batch


def _lane_task(action: Action, stages: Sequence[StageCost], order: Order, link: Link) -> LaneTask:
    kind, stage, batch = action
    cost = stages[stage]
    seconds = {"F": cost.forward, "B": cost.backward, "I": cost.inputs, "W": cost.weights}[kind]
    if kind == "F":
        if stage == 0:
            return LaneTask(_key(action), seconds)
        before, other = "F", stage - 1
    elif kind == "W":
        before, other = "I", stage
    elif stage == len(stages) - 1:
        before, other = "F", stage
    else:
        before, other = "I", stage + 1
    here = order.homes[stage] == order.homes[other]
    gap = 0.0 if here else link.seconds(stages[max(stage, other)].given)
    return LaneTask(_key(action), seconds, (((before, other, batch), gap),))


def in_flight(order: Order) -> tuple[int, ...]:
    """Return the most micro-batches that each stage holds at once, from forward to backward."""
    most = [0] * len(order.homes)
    now = [0] * len(order.homes)
    for actions in order.ranks:
        for kind, stage, _ in actions:
            now[stage] += {"F": 1, "B": -1, "W": -1, "I": 0}[kind]
            most[stage] = max(most[stage], now[stage])
    return tuple(most)


def rank_peak(stages: Sequence[StageCost], order: Order, rank: int, batches: int) -> int:
    """Return the highest bytes of a rank: constant state, receive buffers, and its stages' activations."""
    own = [stages[stage] for stage, home in enumerate(order.homes) if home == rank]
    constant = sum(cost.state + batches * (cost.given + cost.passed) for cost in own)
    return constant + step_rise(stages, order, rank)


def step_rise(stages: Sequence[StageCost], order: Order, rank: int) -> int:
    """Return the rise of a rank's memory above its bytes at the start of a step."""
    return max(_levels(stages, order, rank))


def _levels(stages: Sequence[StageCost], order: Order, rank: int) -> Iterator[int]:
    """Yield the highest bytes during each action.

    Torch's schedules keep sent tensors until the step is over. A tensor that a stage passes to another of its
    own rank stays until the next step replaces it, so a step begins with the tensors of the step before,
    forward and backward. A stage's first backward allocates its gradients.
    """
    now = 0
    grown: set[int] = set()
    for kind, stage, _ in order.ranks[rank]:
        cost = stages[stage]
        if kind == "F":
            yield now + cost.rise
            now += cost.held
            if stage + 1 < len(stages) and order.homes[stage + 1] == rank:
                now -= cost.passed
            continue
        new = kind != "I" and stage not in grown
        yield now + _backward_rise(cost, kind, stage, new)
        if new:
            grown.add(stage)
            now += cost.gradients
        if kind != "W" and stage and order.homes[stage - 1] != rank:
            now += cost.given
        if kind == "I":
            now += cost.waiting
        else:
            now -= cost.held + (cost.waiting if kind == "W" else 0) - cost.passed


def _backward_rise(cost: StageCost, kind: str, stage: int, new: bool) -> int:
    """Return the rise of a backward above the bytes held before it.

    Backward to the inputs frees nothing, and keeps tensors for backward to the weights. The first stage has
    only the latter.
    """
    if kind == "I":
        return cost.split
    if kind == "B" or stage == 0:
        return (cost.first if new else cost.back) - cost.held
    return max(0, cost.gradients - cost.held - cost.waiting) if new else 0
