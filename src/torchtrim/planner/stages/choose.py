"""Chooses cuts, a schedule and micro-batches by the simulated time of a step within a budget."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torchtrim.core.units import format_bytes
from torchtrim.errors import InfeasibleBudget, Unsupported
from torchtrim.planner.stages.chain import Chain
from torchtrim.planner.stages.costs import Link, StageCost, clocked_as, stages_of
from torchtrim.planner.stages.cut import Cuts, balanced, improved
from torchtrim.planner.stages.timing import Simulated, rank_peak, step_seconds, timed
from torchtrim.records.pipeline import (
    SCHEDULES,
    SPLITS_BACKWARD,
    Clocked,
    Order,
    Pipeline,
    Schedule,
    Stage,
)

Orders = Callable[[Schedule, int, int, int], Order | None]
_MOST_MICROBATCHES = 64  # Arbitrary; a pipeline's bubble is small long before.
_STAGES_A_RANK = (1, 2)
_IMPROVED = 8  # Arbitrary; moving cuts simulates hundreds of steps for each.
_SHORT = 2  # Arbitrary; those that are clocked besides the best of a schedule.


class Ways(NamedTuple):
    """What a pipeline may be: how many ranks and replicas, which schedules, how many micro-batches."""

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
    simulated: Simulated
    order: Order

    @property
    def peak(self) -> int:
        """The highest peak of any rank."""
        return max(self.simulated.peaks)


class Chosen(NamedTuple):
    """The quickest that fits, and the best of each schedule, the quickest first.

    `shortlist`: the few quickest of each schedule, for whose stages it pays to be clocked.
    """

    best: StageCandidate
    others: tuple[StageCandidate, ...]
    pipeline: Pipeline
    shortlist: tuple[StageCandidate, ...]


def choose(
    chain_of: Callable[[float], Chain], ways: Ways, budget: int | None, orders: Orders
) -> Chosen:
    """The quickest pipeline whose ranks all stay within `budget` bytes.

    `chain_of` gives the model for micro-batches of a share of the batch. Raises `Unsupported` where the
    model has too few places to cut, and `InfeasibleBudget` where no rank's plan fits.
    """
    found = list(_candidates(chain_of, ways, budget, orders))
    if not found:
        raise Unsupported(_nothing(chain_of(1.0), ways))
    found = _improved(found, chain_of, ways, budget)
    fits = [one for one in found if budget is None or one.peak <= budget]
    if not fits:
        raise _infeasible(min(found, key=lambda one: one.peak))
    return _chosen(fits, chain_of(1.0).root, ways)


def rechosen(chosen: Chosen, clocks: Sequence[Sequence[Clocked]], ways: Ways) -> Chosen:
    """The choice from the shortlist again, with what the actions of each one's stages were clocked at."""
    found = []
    for one, clocked in zip(chosen.shortlist, clocks, strict=True):
        stages = tuple(clocked_as(*both) for both in zip(one.stages, clocked, strict=True))
        simulated = timed(stages, one.order, one.microbatches, ways.link)
        found.append(one._replace(stages=stages, simulated=simulated))
    return _chosen(found, chosen.pipeline.root, ways)


def _chosen(fits: list[StageCandidate], root: str, ways: Ways) -> Chosen:
    fits = sorted(fits, key=lambda one: (one.simulated.seconds, one.peak))
    by_schedule: dict[Schedule, list[StageCandidate]] = {}
    for one in fits:
        by_schedule.setdefault(one.schedule, []).append(one)
    others = tuple(several[0] for several in by_schedule.values())
    few = (one for several in by_schedule.values() for one in _shortened(several))
    return Chosen(fits[0], others, pipeline_of(root, fits[0], ways), tuple(few))


def _shortened(several: Sequence[StageCandidate]) -> list[StageCandidate]:
    """The first few that differ in more than where they are cut."""
    found = {(one.microbatches, len(one.stages)): one for one in reversed(several)}
    return sorted(found.values(), key=lambda one: one.simulated.seconds)[:_SHORT]


def _candidates(
    chain_of: Callable[[float], Chain], ways: Ways, budget: int | None, orders: Orders
) -> Iterator[StageCandidate]:
    batch = chain_of(1.0).batch
    for microbatches in _microbatches(batch, ways):
        chain = chain_of(1 / (microbatches * ways.replicas))
        for schedule in ways.schedules:
            for each in _STAGES_A_RANK:
                count = each * ways.ranks
                order = orders(schedule, ways.ranks, count, microbatches)
                if order is not None and count <= len(chain.segments):
                    cuts = _cut(chain, count, budget)
                    yield _candidate(chain, schedule, microbatches, cuts, order, ways, budget)


def _microbatches(batch: int, ways: Ways) -> list[int]:
    """The numbers of micro-batches that divide the batch of a replica."""
    own = batch // ways.replicas
    if batch % ways.replicas:
        return []
    wanted = ways.microbatches or range(1, min(own, _MOST_MICROBATCHES) + 1)
    return [count for count in wanted if own and own % count == 0]


@functools.lru_cache(maxsize=256)
def _cut(chain: Chain, count: int, budget: int | None) -> Cuts:
    return balanced(chain.segments, count, budget)


def _candidate(
    chain: Chain,
    schedule: Schedule,
    microbatches: int,
    cuts: Cuts,
    order: Order,
    ways: Ways,
    budget: int | None,
) -> StageCandidate:
    """The candidate, with stages that recompute where ranks would be over the budget."""
    again: tuple[int, ...] = ()
    stages = stages_of(chain, cuts)
    if budget is not None and schedule not in SPLITS_BACKWARD:
        again = _recomputed(chain, cuts, stages, order, microbatches, budget)
        stages = stages_of(chain, cuts, again)
    simulated = timed(stages, order, microbatches, ways.link)
    return StageCandidate(schedule, microbatches, cuts, again, tuple(stages), simulated, order)


def _recomputed(
    chain: Chain,
    cuts: Cuts,
    stages: Sequence[StageCost],
    order: Order,
    microbatches: int,
    budget: int,
) -> tuple[int, ...]:
    """On each rank over the budget, the stages that hold most, one after the other, until it fits."""
    again: list[int] = []
    for rank in range(len(order.ranks)):
        own = [stage for stage, home in enumerate(order.homes) if home == rank]
        for stage in sorted(own, key=lambda one: -stages[one].held):
            if rank_peak(stages_of(chain, cuts, again), order, rank, microbatches) <= budget:
                break
            again.append(stage)
    return tuple(sorted(again))


def _improved(
    found: list[StageCandidate],
    chain_of: Callable[[float], Chain],
    ways: Ways,
    budget: int | None,
) -> list[StageCandidate]:
    """The best few with their cuts moved while that makes the simulated step shorter."""

    def rank(one: StageCandidate) -> tuple[bool, float]:
        return (budget is not None and one.peak > budget, one.simulated.seconds)

    found = sorted(found, key=rank)
    best = []
    for one in found[:_IMPROVED]:
        chain = chain_of(1 / (one.microbatches * ways.replicas))

        def price(cuts: Cuts, one: StageCandidate = one, chain: Chain = chain) -> float:
            stages = stages_of(chain, cuts, one.again)
            seconds = step_seconds(stages, one.order, ways.link)
            return seconds + _over(stages, one, budget) * 10 * seconds

        cuts, _ = improved(one.cuts, len(chain.segments), price)
        best.append(
            _candidate(chain, one.schedule, one.microbatches, cuts, one.order, ways, budget)
        )
    return [*best, *found[_IMPROVED:], *found[:_IMPROVED]]


def _over(stages: Sequence[StageCost], one: StageCandidate, budget: int | None) -> float:
    """By how much the worst rank is over the budget, as a share of it."""
    if budget is None:
        return 0.0
    ranks = range(len(one.order.ranks))
    peak = max(rank_peak(stages, one.order, rank, one.microbatches) for rank in ranks)
    return max(0.0, peak / budget - 1)


def pipeline_of(root: str, best: StageCandidate, ways: Ways) -> Pipeline:
    """The candidate as a plan has it."""
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


def _nothing(chain: Chain, ways: Ways) -> str:
    if len(chain.segments) < ways.ranks:
        return (
            f"{chain.root} can be cut into {len(chain.segments)} stages at most, and {ways.ranks} "
            f"are wanted. "
            "A stage begins where one tensor alone goes from one module to the next."
        )
    return (
        f"no schedule of torch runs {ways.ranks} ranks x {ways.replicas} replicas on a batch of "
        f"{chain.batch} "
        "samples, which has to divide into equal micro-batches. Give the loader another batch size, "
        "or ask for "
        "fewer --stages or --replicas."
    )


def _infeasible(smallest: StageCandidate) -> InfeasibleBudget:
    peak = smallest.peak
    rank = smallest.simulated.peaks.index(peak)
    return InfeasibleBudget(
        f"no pipeline fits: the smallest peak of the largest rank is {format_bytes(peak)}, on rank {rank} "
        f"({smallest.schedule}, {smallest.microbatches} micro-batches). Give it more --memory or "
        f"more --stages.",
        smallest_bytes=peak,
        set_by=f"rank {rank}",
    )
