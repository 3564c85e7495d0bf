"""A model over many devices: stages, replicas and shards, by simulated time within a budget of each device.

All devices are used. Devices that share a stage of a pipeline hold it in `shards` parts, as FSDP2's
`fully_shard` does over a mesh of `replicas x shards`; such groups are adjacent, so that shards are on one
node if possible. Computation takes as long as the chain's segments; exchanges overlap it while it lasts.
Every segment but the last may be recomputed in backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from typing import NamedTuple

from torchtrim.core.units import format_bytes
from torchtrim.errors import InfeasibleBudget, Unsupported
from torchtrim.planner.stages.chain import Chain, Segment
from torchtrim.planner.stages.choose import Orders, balanced_cuts
from torchtrim.planner.stages.timing import Link, StageCost, stage_of, step_seconds
from torchtrim.records.pipeline import Schedule

_SCHEDULE: Schedule = "1F1B"
_MOST_MICROBATCHES = 512  # Arbitrary; bounds the layouts. The bubble is negligible long before.
# Arbitrary; instead of larger micro-batches, more of them are as quick and need less memory.
_MOST_SAMPLES = 16
_SIMULATED = 3  # Arbitrary; micro-batches to simulate for each stage, enough to fill the pipeline.


class Fabric(NamedTuple):
    """The network of the devices.

    A device sends `inside` bytes per second to each of the `node` devices of its node, `between` to others.
    """

    node: int = 8
    inside: float = 450e9
    between: float = 50e9
    latency: float = 2e-5

    def gathered(self, size: int, ranks: int, apart: int = 1) -> float:
        """Return the seconds of an all-gather or reduce-scatter over `ranks`, spaced `apart` devices.

        Rings use all links of a node at once.
        """
        if ranks <= 1:
            return 0.0
        own = max(self.node // apart, 1)
        rate = self.inside if ranks <= own else min(self.inside, self.between * own)
        return self.latency + size * (ranks - 1) / ranks / rate


class RankLayout(NamedTuple):
    """A division of work among devices: `microbatches` of `samples` for each shard of each replica.

    `again`: segments are recomputed in backward. `reshard`: parameters are freed after each use and gathered
    for the next; otherwise they stay for the whole step.
    """

    stages: int
    replicas: int
    shards: int
    samples: int
    microbatches: int
    again: bool
    reshard: bool


class SimulatedLayout(NamedTuple):
    """A simulated layout: `seconds` of a step, and the highest bytes of any device.

    `bubble` and `exposed`: shares of the step that devices spend idle or awaiting an exchange.
    """

    layout: RankLayout
    seconds: float
    bubble: float
    exposed: float
    peak_bytes: int
    cuts: tuple[str, ...]


class _ShardedStage(NamedTuple):
    """A stage of sharded segments: its cost, exposed seconds a micro-batch and a step, constant bytes."""

    cost: StageCost
    exposed: float
    once: float
    always: int


FABRIC = Fabric()


def spread(
    chain_of: Callable[[float], Chain],
    devices: int,
    batch: int,
    budget: int,
    orders: Orders,
    fabric: Fabric = FABRIC,
    layouts: Sequence[RankLayout] = (),
) -> tuple[SimulatedLayout, ...]:
    """Return the layouts of a batch that stay within `budget` bytes on each device, the quickest first.

    `layouts`: candidates, by default all. Raises `Unsupported` if there are none, and `InfeasibleBudget`.
    """
    recorded = chain_of(1.0).batch

    @functools.cache
    def edges_of(samples: int, stages: int) -> tuple[int, ...]:
        segments = chain_of(samples / recorded).segments
        return 0, *balanced_cuts(segments, stages), len(segments)

    simulated = []
    for layout in layouts or _layouts(devices, batch, len(chain_of(1.0).segments)):
        chain = chain_of(layout.samples / recorded)
        edges = edges_of(layout.samples, layout.stages)
        if (result := _simulated(chain, edges, layout, fabric, orders)) is not None:
            simulated.append(result)
    if not simulated:
        raise Unsupported(
            f"a batch of {batch} samples cannot be divided evenly among {devices} devices. Use another batch."
        )
    fits = [result for result in simulated if result.peak_bytes <= budget]
    if not fits:
        least = min(simulated, key=lambda result: result.peak_bytes)
        raise InfeasibleBudget(
            f"no layout of {devices} devices fits: the smallest peak of a device is "
            f"{format_bytes(least.peak_bytes)}, with {describe(least.layout)}. Use more devices or memory.",
            smallest_bytes=least.peak_bytes,
            set_by=describe(least.layout),
        )
    return tuple(sorted(fits, key=lambda result: (result.seconds, result.peak_bytes)))


def describe(layout: RankLayout) -> str:
    """Return a description of the layout."""
    again = ", recomputes" if layout.again else ""
    kept = "" if layout.reshard or layout.shards == 1 else ", parameters stay gathered"
    return (
        f"{layout.stages} stages x {layout.replicas} replicas x {layout.shards} shards, "
        f"{layout.microbatches} micro-batches of {layout.samples}{again}{kept}"
    )


def _layouts(devices: int, batch: int, segments: int) -> Iterator[RankLayout]:
    for stages in _divisors(devices):
        ways = devices // stages
        if stages > segments or batch % ways:
            continue
        for shards in _divisors(ways):
            for samples in _divisors(batch // ways):
                count = batch // ways // samples
                if samples > _MOST_SAMPLES or count > _MOST_MICROBATCHES or count < stages:
                    continue
                for again, reshard in product((False, True), (True, False)):
                    if reshard or shards > 1:
                        replicas = ways // shards
                        yield RankLayout(stages, replicas, shards, samples, count, again, reshard)


def _divisors(count: int) -> list[int]:
    return [divisor for divisor in range(1, count + 1) if count % divisor == 0]


def _simulated(
    chain: Chain, edges: Sequence[int], layout: RankLayout, fabric: Fabric, orders: Orders
) -> SimulatedLayout | None:
    few = min(layout.microbatches, _SIMULATED * layout.stages)
    order = orders(_SCHEDULE, layout.stages, layout.stages, few)
    if layout.stages > 1 and order is None:
        return None
    stages = [
        _stage(chain.segments, first, last, layout, fabric) for first, last in pairwise(edges)
    ]
    costs = [stage.cost for stage in stages]
    running = layout.microbatches * costs[0].seconds
    if layout.stages > 1 and order is not None:
        apart = layout.replicas * layout.shards >= fabric.node
        link = Link(fabric.latency, fabric.between if apart else fabric.inside)
        # In a full pipeline the longest stage sets the pace.
        pace = max(cost.seconds for cost in costs)
        running = step_seconds(costs, order, link) + (layout.microbatches - few) * pace
    seconds = running + max(stage.once + stage.cost.update for stage in stages)
    mean = sum(cost.seconds for cost in costs) * layout.microbatches / len(stages)
    awaits = max(stage.exposed * layout.microbatches + stage.once for stage in stages)
    return SimulatedLayout(
        layout,
        seconds,
        max(0.0, 1 - mean / running),
        awaits / seconds if seconds else 0.0,
        max(_peak(stage, number, layout) for number, stage in enumerate(stages)),
        tuple(cost.where for cost in costs[1:]),
    )


def _stage(
    segments: Sequence[Segment], first: int, last: int, layout: RankLayout, fabric: Fabric
) -> _ShardedStage:
    own = segments[first:last]
    plain = stage_of(segments, first, last, again=False)
    forwards = [segment.forward for segment in own]
    again = [layout.again and number < len(segments) for number in range(first + 1, last + 1)]
    backwards = [
        segment.inputs + segment.weights + (segment.forward if reruns else 0.0)
        for segment, reruns in zip(own, again, strict=True)
    ]
    gathers = [fabric.gathered(segment.parameters, layout.shards) for segment in own]
    if layout.reshard:
        forward = _overlapped_seconds(forwards, gathers)
        backward = _overlapped_seconds(backwards[::-1], [2 * each for each in reversed(gathers)])
        once = 0.0
    else:
        forward, backward = sum(forwards), sum(backwards)
        once = _excess(sum(gathers), forward) + _excess(sum(gathers), backward)
    size = sum(segment.parameters for segment in own) // layout.shards
    once += _excess(2 * fabric.gathered(size, layout.replicas, layout.shards), backward)
    held, rise, back = _activations(own, again, plain)
    cost = plain._replace(
        forward=forward,
        backward=backward,
        update=plain.update / layout.shards,
        held=held,
        rise=rise,
        back=back,
        first=back,
    )
    exposed = forward + backward - sum(forwards) - sum(backwards)
    return _ShardedStage(cost, exposed, once, _constant_bytes(own, layout))


def _overlapped_seconds(work: Sequence[float], gathers: Sequence[float]) -> float:
    """Return the time of `work` in sequence when each all-gather overlaps the item before."""
    return gathers[0] + sum(map(max, work, [*gathers[1:], 0.0]))


def _excess(seconds: float, hidden: float) -> float:
    return max(0.0, seconds - hidden)


def _activations(
    own: Sequence[Segment], again: Sequence[bool], plain: StageCost
) -> tuple[int, int, int]:
    """Return the bytes that a micro-batch in flight holds, and the highest in forward and in backward."""
    if not any(again):
        return plain.held, plain.rise, max(plain.back, plain.first - plain.gradients)
    sent = plain.held - sum(segment.held for segment in own)
    held = rise = back = 0
    for segment, reruns in zip(own, again, strict=True):
        rise = max(rise, held + segment.rise)
        back = max(back, held + max(segment.back, segment.rise))
        held += segment.given if reruns else segment.held
    return held + max(sent, 0), rise, max(back, rise)


def _constant_bytes(own: Sequence[Segment], layout: RankLayout) -> int:
    """Return the constant bytes of a stage on one device: its shards, and gathered parameters."""
    state = sum(segment.state + segment.gradients for segment in own)
    if layout.shards == 1:
        return state
    sizes = [segment.parameters for segment in own]
    if not layout.reshard:
        return state // layout.shards + 2 * sum(sizes)
    two = max(a + b for a, b in pairwise([*sizes, 0]))
    return state // layout.shards + two + max(sizes)


def _peak(stage: _ShardedStage, number: int, layout: RankLayout) -> int:
    flights = min(layout.microbatches, layout.stages - number)
    cost = stage.cost
    received = (cost.given if number else 0) + (cost.passed if layout.stages > 1 else 0)
    return stage.always + (flights - 1) * cost.held + max(cost.rise, cost.back) + flights * received
