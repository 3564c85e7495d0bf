"""Segments of a chain -> stages, and what each costs a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torchtrim.planner.stages.chain import Chain, Segment
from torchtrim.records.pipeline import Clocked


class Link(NamedTuple):
    """What it takes to send a tensor to another rank."""

    latency: float = 1e-4
    bytes_per_second: float = 2e9

    def seconds(self, size: int) -> float:
        """For so many bytes."""
        return self.latency + size / self.bytes_per_second


class StageCost(NamedTuple):
    """What a stage costs for one micro-batch.

    Seconds: `forward`, whole `backward`, backward to the `inputs` and to the `weights`, `update` of the
    parameters. Bytes: `held` in flight; `rise`, `back` and `first`, the highest in forward, in backward and
    in the first backward, which makes gradients, `held` included; `waiting` besides, between the two halves
    of backward, and `split`, the highest over `held` in the first half; `given` and `passed`, what it
    receives and what it sends on; `gradients` and `state`.
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
    """The stages of a chain that is cut before these segments; those in `again` recompute."""
    edges = [0, *cuts, len(chain.segments)]
    return [
        stage_of(chain.segments, first, last, again=number in again)
        for number, (first, last) in enumerate(pairwise(edges))
    ]


def stage_of(segments: Sequence[Segment], first: int, last: int, *, again: bool) -> StageCost:
    """The stage of segments `first <= i < last`."""
    own = segments[first:last]
    forward = sum(one.forward for one in own)
    inputs, weights = sum(one.inputs for one in own), sum(one.weights for one in own)
    held, rise, back, new = _bytes(own)
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
        split=_split(own) if first else 0,
        given=own[0].given,
        passed=passed,
        gradients=sum(one.gradients for one in own),
        state=sum(one.state for one in own),
        recompute=again,
    )


def clocked_as(cost: StageCost, clocked: Clocked) -> StageCost:
    """The stage with the seconds at which its actions were clocked."""
    return cost._replace(
        forward=clocked.forward,
        backward=clocked.backward,
        inputs=clocked.inputs,
        weights=clocked.weights,
    )


def _split(own: Sequence[Segment]) -> int:
    """The highest over what forward has left, in backward to the inputs."""
    most = waiting = 0
    for number, one in reversed([*enumerate(own)]):
        follows = own[number + 1].given if number + 1 < len(own) else 0
        most = max(most, waiting + follows + one.split)
        waiting += one.waiting
    return max(most, waiting)


def _bytes(own: Sequence[Segment]) -> tuple[int, int, int, int]:
    """Bytes held; the highest in forward, in backward, and in the first backward, whose gradients stay."""
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
