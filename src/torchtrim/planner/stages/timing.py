"""Stages and an order -> the start of each action of each rank, idle times, and peaks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from torchtrim.planner.stages.chain import Chain, Segment
from torchtrim.records.pipeline import Action, Order, StageSeconds
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
    forward = sum(one.forward for one in own)
    inputs, weights = sum(one.inputs for one in own), sum(one.weights for one in own)
    held, rise, back, new = _stage_bytes(own)
    passed = segments[last].given if last < len(segments) else 0
    if again:
        held = passed
    split = (inputs, weights) if first else (0.0, inputs + weights)
    return StageCost(
        where=own[0].where,
        forward=forward,
        backward=inputs + weights + (forward if again else 0.0),
        inputs=split[0],
        weights=split[1],
        update=sum(one.update for one in own),
        held=held,
        rise=rise,
        back=back,
        first=new,
        waiting=sum(one.waiting for one in own) if first else 0,
        split=_inputs_rise(own) if first else 0,
        given=own[0].given,
        passed=passed,
        gradients=sum(one.gradients for one in own),
        state=sum(one.state for one in own),
        recompute=again,
    )


def clocked_as(cost: StageCost, clocked: StageSeconds) -> StageCost:
    """Return the stage with the measured seconds of its actions."""
    return cost._replace(
        forward=clocked.forward,
        backward=clocked.backward,
        inputs=clocked.inputs,
        weights=clocked.weights,
    )


def _inputs_rise(own: Sequence[Segment]) -> int:
    """Return the rise above the held bytes in backward to the inputs."""
    most = waiting = 0
    for number, one in reversed([*enumerate(own)]):
        follows = own[number + 1].given if number + 1 < len(own) else 0
        most = max(most, waiting + follows + one.split)
        waiting += one.waiting
    return max(most, waiting)


def _stage_bytes(own: Sequence[Segment]) -> tuple[int, int, int, int]:
    """Return the held bytes, and the highest in forward, in backward, and in the first backward."""
    held = rise = back = new = 0
    for number, one in enumerate(own):
        follows = own[number + 1].given if number + 1 < len(own) else 0
        grown = sum(later.gradients for later in own[number + 1 :])
        rise = max(rise, held + one.rise)
        back = max(back, held + one.back + follows)
        new = max(new, held + one.first + follows + grown)
        held += one.held
    sent = own[-1].sent
    return held + sent, max(rise, held + sent), back + sent, new + sent


_Key = tuple[str, int, int]


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
    tasks = [
        [_lane_task(action, stages, order, link) for action in actions] for actions in order.ranks
    ]
    times = run_lanes(tasks)
    return tuple(
        tuple(StageBar(action, *times[_key(action)]) for action in actions)
        for actions in order.ranks
    )


def _key(action: Action) -> _Key:
    return ("I" if action.kind == "B" else action.kind), action.stage, action.batch


def _seconds(action: Action, stage: StageCost) -> float:
    return {
        "F": stage.forward,
        "B": stage.backward,
        "I": stage.inputs,
        "W": stage.weights,
    }[action.kind]


def _lane_task(action: Action, stages: Sequence[StageCost], order: Order, link: Link) -> LaneTask:
    kind, stage, batch = action
    seconds = _seconds(action, stages[stage])
    if kind == "W":
        return LaneTask(_key(action), seconds, ((("I", stage, batch), 0.0),))
    forward = kind == "F"
    if forward and stage == 0:
        return LaneTask(_key(action), seconds)
    if not forward and stage == len(stages) - 1:
        return LaneTask(_key(action), seconds, ((("F", stage, batch), 0.0),))
    other = stage - 1 if forward else stage + 1
    here = order.homes[stage] == order.homes[other]
    gap = 0.0 if here else link.seconds(stages[max(stage, other)].given)
    return LaneTask(_key(action), seconds, ((("F" if forward else "I", other, batch), gap),))


def in_flight(order: Order) -> tuple[int, ...]:
    """Return the most micro-batches that each stage holds at once, from the end of forward to that of
    backward."""
    most = [0] * len(order.homes)
    now = [0] * len(order.homes)
    for actions in order.ranks:
        for kind, stage, _ in actions:
            now[stage] += {"F": 1, "B": -1, "W": -1, "I": 0}[kind]
            most[stage] = max(most[stage], now[stage])
    return tuple(most)


def rank_peak(stages: Sequence[StageCost], order: Order, rank: int, batches: int) -> int:
    """Return the highest bytes of a rank: its constant state, receive buffers, and its stages'
    activations."""
    own = [stages[stage] for stage, home in enumerate(order.homes) if home == rank]
    always = sum(one.state + batches * (one.given + one.passed) for one in own)
    return always + step_rise(stages, order, rank)


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
        yield now + _backward_rise(one, kind, stage, new)
        if new:
            grown.add(stage)
            now += one.gradients
        if kind in "BI" and stage and order.homes[stage - 1] != rank:
            now += one.given
        if kind == "I":
            now += one.waiting
        elif ends:
            now -= one.held + waiting - one.passed


def _backward_rise(one: StageCost, kind: str, stage: int, new: bool) -> int:
    """Return the rise of a backward above the bytes held before it.

    Backward to the inputs frees nothing, and keeps tensors for backward to the weights; the first stage
    leaves everything to the latter.
    """
    rises = (one.first if new else one.back) - one.held
    if kind == "B" or (kind == "W" and not stage):
        return rises
    if kind == "I":
        return one.split
    return max(0, one.gradients - one.held - one.waiting) if new else 0
