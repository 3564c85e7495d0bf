"""Chooses cuts, a schedule and micro-batches by the simulated time of a step within a budget.

Cuts start from the exact optimum for the longest stage, and then move while the simulated step gets shorter.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise, product
from math import comb
from typing import NamedTuple

from msgspec.structs import asdict

from torchtrim.core.units import format_bytes
from torchtrim.errors import InfeasibleBudget, Unsupported
from torchtrim.planner.stages.chain import Chain, Segment
from torchtrim.planner.stages.timing import (
    Link,
    SimulatedPipeline,
    StageCost,
    rank_peak,
    simulate_pipeline,
    stages_of,
    step_seconds,
)
from torchtrim.records.pipeline import (
    SCHEDULES,
    SPLITS_BACKWARD,
    Order,
    Pipeline,
    Schedule,
    Stage,
    StageSeconds,
)

Orders = Callable[[Schedule, int, int, int], Order | None]
_MOST_MICROBATCHES = 64  # Arbitrary; the bubble of a pipeline is small long before.
_STAGES_A_RANK = (1, 2)  # One, or two for the interleaved schedules.
_IMPROVED = 8  # Arbitrary; moving the cuts of each simulates hundreds of steps.
_SHORT = 2  # Arbitrary; candidates of each schedule on the shortlist.


class PipelineSettings(NamedTuple):
    """Requirements on a pipeline: ranks and replicas, allowed schedules, and numbers of micro-batches."""

    ranks: int
    replicas: int = 1
    schedules: Sequence[Schedule] = SCHEDULES
    microbatches: Sequence[int] = ()
    link: Link = Link()


class StageCandidate(NamedTuple):
    """One way to run the model in stages, simulated."""

    schedule: Schedule
    microbatches: int
    cuts: Cuts
    again: tuple[int, ...]
    stages: tuple[StageCost, ...]
    simulated: SimulatedPipeline
    order: Order

    @property
    def peak(self) -> int:
        """The highest peak of any rank."""
        return max(self.simulated.peaks)


class PipelineChoice(NamedTuple):
    """The quickest candidate that fits, and the best of each schedule, the quickest first.

    `shortlist`: the few quickest of each schedule, whose stages are worth measuring.
    """

    best: StageCandidate
    others: tuple[StageCandidate, ...]
    pipeline: Pipeline
    shortlist: tuple[StageCandidate, ...]


def choose(
    chain_of: Callable[[float], Chain], ways: PipelineSettings, budget: int | None, orders: Orders
) -> PipelineChoice:
    """Return the quickest pipeline whose ranks all stay within `budget` bytes.

    `chain_of` returns the model for micro-batches of a share of the batch. Raises `Unsupported` if the model
    has too few places to cut, and `InfeasibleBudget` if no candidate fits.
    """
    candidates = list(_candidates(chain_of, ways, budget, orders))
    if not candidates:
        raise Unsupported(_no_pipeline(chain_of(1.0), ways))
    candidates = _improved(candidates, chain_of, ways, budget)
    fits = [each for each in candidates if budget is None or each.peak <= budget]
    if not fits:
        raise _infeasible(min(candidates, key=lambda each: each.peak))
    return _chosen(fits, chain_of(1.0).root, ways)


def choose_clocked(
    chosen: PipelineChoice, clocks: Sequence[Sequence[StageSeconds]], ways: PipelineSettings
) -> PipelineChoice:
    """Choose again from the shortlist, with measured times for the actions of each candidate's stages."""
    candidates = []
    for candidate, clocked in zip(chosen.shortlist, clocks, strict=True):
        pairs = zip(candidate.stages, clocked, strict=True)
        stages = tuple(cost._replace(**asdict(seconds)) for cost, seconds in pairs)
        simulated = simulate_pipeline(stages, candidate.order, candidate.microbatches, ways.link)
        candidates.append(candidate._replace(stages=stages, simulated=simulated))
    return _chosen(candidates, chosen.pipeline.root, ways)


def _chosen(fits: list[StageCandidate], root: str, ways: PipelineSettings) -> PipelineChoice:
    fits = sorted(fits, key=lambda each: (each.simulated.seconds, each.peak))
    by_schedule: dict[Schedule, list[StageCandidate]] = {}
    for candidate in fits:
        by_schedule.setdefault(candidate.schedule, []).append(candidate)
    others = tuple(several[0] for several in by_schedule.values())
    shortlist: list[StageCandidate] = []
    for several in by_schedule.values():  # the quickest few that differ in more than their cuts
        distinct = {(each.microbatches, len(each.stages)): each for each in reversed(several)}
        shortlist += sorted(distinct.values(), key=lambda each: each.simulated.seconds)[:_SHORT]
    return PipelineChoice(fits[0], others, pipeline_of(root, fits[0], ways), tuple(shortlist))


def _candidates(
    chain_of: Callable[[float], Chain], ways: PipelineSettings, budget: int | None, orders: Orders
) -> Iterator[StageCandidate]:
    batch = chain_of(1.0).batch
    for microbatches in _microbatches(batch, ways):
        chain = chain_of(1 / (microbatches * ways.replicas))
        for schedule in ways.schedules:
            for each in _STAGES_A_RANK:
                count = each * ways.ranks
                order = orders(schedule, ways.ranks, count, microbatches)
                if order is not None and count <= len(chain.segments):
                    cuts = _cut(chain.segments, count, budget)
                    yield _candidate(chain, schedule, microbatches, cuts, order, ways, budget)


def _microbatches(batch: int, ways: PipelineSettings) -> list[int]:
    own = batch // ways.replicas
    if batch % ways.replicas:
        return []
    wanted = ways.microbatches or range(1, min(own, _MOST_MICROBATCHES) + 1)
    return [count for count in wanted if own and own % count == 0]


def _candidate(
    chain: Chain,
    schedule: Schedule,
    microbatches: int,
    cuts: Cuts,
    order: Order,
    ways: PipelineSettings,
    budget: int | None,
) -> StageCandidate:
    """Return the candidate, with stages that recompute on ranks that would exceed the budget."""
    again: list[int] = []
    stages = plain = stages_of(chain, cuts)
    if budget is not None and schedule not in SPLITS_BACKWARD:
        # On each rank over the budget, the stages that hold most recompute, until it fits.
        for stage in sorted(range(len(plain)), key=lambda number: -plain[number].held):
            if rank_peak(stages, order, order.homes[stage], microbatches) > budget:
                again.append(stage)
                stages = stages_of(chain, cuts, again)
    simulated = simulate_pipeline(stages, order, microbatches, ways.link)
    return StageCandidate(
        schedule, microbatches, cuts, tuple(sorted(again)), tuple(stages), simulated, order
    )


def _improved(
    candidates: list[StageCandidate],
    chain_of: Callable[[float], Chain],
    ways: PipelineSettings,
    budget: int | None,
) -> list[StageCandidate]:
    """Return the candidates, and the best few with cuts that make the simulated step shorter."""
    candidates = sorted(
        candidates,
        key=lambda each: (budget is not None and each.peak > budget, each.simulated.seconds),
    )
    best = []
    for candidate in candidates[:_IMPROVED]:
        schedule, count, order = candidate.schedule, candidate.microbatches, candidate.order
        chain = chain_of(1 / (count * ways.replicas))

        def price(cuts: Cuts, candidate: StageCandidate = candidate, chain: Chain = chain) -> float:
            order = candidate.order
            stages = stages_of(chain, cuts, candidate.again)
            seconds = step_seconds(stages, order, ways.link)
            if budget is None:
                return seconds
            ranks = range(len(order.ranks))
            peak = max(rank_peak(stages, order, rank, candidate.microbatches) for rank in ranks)
            return seconds + max(0.0, peak / budget - 1) * 10 * seconds

        cuts, _ = improved_cuts(candidate.cuts, len(chain.segments), price)
        best.append(_candidate(chain, schedule, count, cuts, order, ways, budget))
    return [*best, *candidates[_IMPROVED:], *candidates[:_IMPROVED]]


def pipeline_of(root: str, best: StageCandidate, ways: PipelineSettings) -> Pipeline:
    """Return the candidate in a plan's format."""
    return Pipeline(
        root=root,
        cuts=tuple(stage.where for stage in best.stages[1:]),
        schedule=best.schedule,
        ranks=ways.ranks,
        microbatches=best.microbatches,
        replicas=ways.replicas,
        seconds=best.simulated.seconds,
        bubble=best.simulated.bubble,
        peaks=best.simulated.peaks,
        stages=tuple(
            Stage(
                first=cost.where,
                rank=best.order.homes[number],
                forward_seconds=cost.forward,
                backward_seconds=cost.backward,
                held_bytes=cost.held,
                state_bytes=cost.state + cost.gradients,
                recompute=cost.recompute,
            )
            for number, cost in enumerate(best.stages)
        ),
    )


def _no_pipeline(chain: Chain, ways: PipelineSettings) -> str:
    if len(chain.segments) < ways.ranks:
        return (
            f"{chain.root} can be cut into at most {len(chain.segments)} stages, not {ways.ranks}. "
            "A stage begins where a single tensor connects one module to the next."
        )
    return (
        f"no schedule of torch runs {ways.ranks} ranks x {ways.replicas} replicas on a batch of "
        f"{chain.batch} samples, which must divide into equal micro-batches. Give the loader another "
        "batch size, or use fewer --stages or --replicas."
    )


def _infeasible(smallest: StageCandidate) -> InfeasibleBudget:
    peak = smallest.peak
    rank = smallest.simulated.peaks.index(peak)
    return InfeasibleBudget(
        f"no pipeline fits: the smallest peak of the largest rank is {format_bytes(peak)}, on rank {rank} "
        f"({smallest.schedule}, {smallest.microbatches} micro-batches). Use more --memory or "
        "more --stages.",
        smallest_bytes=peak,
        set_by=f"rank {rank}",
    )


Cuts = tuple[int, ...]
_MOST = 600  # Arbitrary; simulated steps for one candidate, about a second.


def balanced_cuts(segments: Sequence[Segment], stages: int, most_bytes: int | None = None) -> Cuts:
    """Return the cuts with the shortest longest stage, by exact dynamic programming in O(stages * segments²).

    Among equals, the first stages are short. `most_bytes`: a limit on the parameters, gradients and optimizer
    state of a stage, dropped if no cuts satisfy it. There must be at least as many segments as stages.
    """
    assert 1 <= stages <= len(segments)
    seconds, states = [0.0], [0]
    for segment in segments:
        seconds.append(seconds[-1] + segment.seconds)
        states.append(states[-1] + segment.state + segment.gradients)

    def cost(first: int, last: int) -> float:
        over = most_bytes is not None and states[last] - states[first] > most_bytes
        return seconds[last] - seconds[first] + (seconds[-1] if over else 0.0)

    count = len(segments)
    best = [(cost(0, last), ()) for last in range(count + 1)]  # type: list[tuple[float, Cuts]]
    for stage in range(1, stages):
        best = [
            min(
                (
                    (max(best[first][0], cost(first, last)), (*best[first][1], first))
                    for first in range(stage, last)
                ),
                default=(float("inf"), ()),
            )
            for last in range(count + 1)
        ]
    return best[count][1]


_cut = functools.lru_cache(maxsize=256)(balanced_cuts)


def improved_cuts(cuts: Cuts, count: int, price: Callable[[Cuts], float]) -> tuple[Cuts, float]:
    """Move one or two cuts while that lowers the price; return the best cuts and their price.

    If there are few possible cuts, all of them are tried. Otherwise the search restarts from random cuts,
    always the same, until its tries are spent: with several stages a rank, there are many local optima.
    """
    if comb(count - 1, len(cuts)) <= _MOST:
        best = min(all_cuts(count, len(cuts) + 1), key=price)
        return best, price(best)
    known: dict[Cuts, float] = {}
    drawn = random.Random(0)
    best = _descend(cuts, count, price, known)
    while len(known) < _MOST:
        start = tuple(sorted(drawn.sample(range(1, count), len(cuts))))
        best = min(best, _descend(start, count, price, known), key=known.__getitem__)
    return best, known[best]


def _descend(
    cuts: Cuts, count: int, price: Callable[[Cuts], float], known: dict[Cuts, float]
) -> Cuts:
    known.setdefault(cuts, price(cuts))
    while True:
        around = dict.fromkeys(_neighbours(cuts, count))
        known.update((near, price(near)) for near in around if near not in known)
        best = min((*around, cuts), key=known.__getitem__)
        if known[best] >= known[cuts]:
            return cuts
        cuts = best


def _neighbours(cuts: Cuts, count: int) -> Iterator[Cuts]:
    """Yield cuts with one cut moved between its neighbors, or two by one place: adjacent or mirrored ones."""
    edges = (0, *cuts, count)
    for at, cut in enumerate(cuts):
        for place in range(edges[at] + 1, edges[at + 2]):
            if place != cut:
                yield (*cuts[:at], place, *cuts[at + 1 :])
        for other in {at + 1, len(cuts) - 1 - at} - {at}:
            for one, two in product((-1, 1), repeat=2) if other < len(cuts) else ():
                moved = list(cuts)
                moved[at] += one
                moved[other] += two
                if all(low < high for low, high in pairwise((0, *moved, count))):
                    yield tuple(moved)


def all_cuts(count: int, stages: int) -> Iterator[Cuts]:
    """Yield all ways to cut `count` segments into stages, for exhaustive searches."""
    yield from combinations(range(1, count), stages - 1)
