"""Data parallel: `DistributedDataParallel` exchanges gradients once a step, and keeps them once.

With `gradient_as_bucket_view` gradients are views of the buckets that exchange them. By default each exists
twice, as `parameter.grad` and in its bucket, and is copied there and back. The results are identical, bit for
bit, with one exception: if the number of ranks is not a power of two, and a step exchanges more than once or
keeps its gradients (`zero_grad(set_to_none=False)`), the mean divides instead of multiplying by the
reciprocal, and the results are equal up to rounding.

With `accumulate = 4` only the fourth micro-batch of a step exchanges gradients, as inside `model.no_sync()`;
by default each does. The ranks' sums are added once instead of for each micro-batch: equal up to rounding,
and until then gradients are those of one rank. It is not planned if anything else reads gradients before the
last exchange, if buffers are broadcast in each forward, or with `find_unused_parameters`. After a step of
fewer micro-batches, as at the end of an epoch, the next forward raises on every rank.

With `bucket_cap_mb = 4` buckets have 4 MiB: smaller ones start earlier, larger ones take less time together.
A size is planned if exchanges outlast backward for less time, by at least 2 % of the step, with a latency and
a time per byte fitted to the recorded exchanges. On two ranks the results are identical, bit for bit; on
more, sums may be added in another order.

With `static_graph` a module with `find_unused_parameters` searches for unused parameters in its first step
only, and arranges its buckets by the readiness of gradients. It is planned if some parameters were unused and
each forward is followed by an exchange, not inside `no_sync`; if all were used, disable the search (TT603).
`DistributedDataParallel` refuses a step that uses other parameters than the first. Results compare as for
another bucket size.

All options take effect before the next forward of the live instance: its reducer is rebuilt from its
settings, as after unpickling, and once more on revert. Communication hooks of the script, mixed precision of
`DistributedDataParallel` and delayed exchanges are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchtrim.executor.places import module_at
from torchtrim.executor.registry import Handle, Option, Roots, TechniqueUnit, all_or_none
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Profile, Replica, is_emulated
from torchtrim.step.edits import NOTHING, Edit, Insert, Need, drops_of
from torchtrim.step.exchanges import (
    LEAST_CAP_SAVING,
    MIB,
    GradientExchange,
    accumulates_unexchanged,
    after_exchange,
    exchange_of,
    overlap_of,
    ranks_of,
    reduces_of,
    rounds_of,
)
from torchtrim.step.step import Step

VIEWS, ACCUMULATE = "gradient_as_bucket_view", "accumulate"
CAP, STATIC = "bucket_cap_mb", "static_graph"
_LEAST_SECONDS = 1e-9
"""An option of zero seconds would save no time; the smallest saving makes the planner use it."""


class DataParallel(TechniqueUnit):
    """`where` names modules in `DistributedDataParallel`. A plan sets one of the four options."""

    name = "data_parallel"
    does = "exchange gradients once a step, and keep them once"
    takes = (VIEWS, ACCUMULATE, CAP, STATIC)
    equivalence = "BITWISE"

    def options(self, step: Step) -> Sequence[Option]:
        """Return each replica's settings that save: views, fewer exchanges, other buckets, a static graph."""
        if (profile := step.profile) is None:
            return []
        return [
            Option(self.name, profile.modules[replica.module].path, (), None, (setting,), weaker)
            for replica in profile.replicas
            for setting, weaker in _settings(step, profile, replica)
        ]

    def edits(self, step: Step, option: Option) -> Edit | None:
        """Return the edit that ends gradients once they are in their bucket, or removes exchanges."""
        if (profile := step.profile) is None:
            return None
        replica = next(
            r for r in profile.replicas if profile.modules[r.module].path == option.where
        )
        changed = dict(option.settings)
        if VIEWS in changed:
            return _as_views(step, exchange_of(step, replica))
        if CAP in changed:
            best = _best_cap(step, replica)
            return (
                None if best is None else NOTHING._replace(inserts=(_time_saving(step, best[1]),))
            )
        seconds = 0.0 if STATIC in changed else rounds_of(profile).needless_seconds
        return NOTHING._replace(inserts=(_time_saving(step, seconds),))

    def apply(self, roots: Roots, technique: Technique) -> Handle:
        """Rebuild the reducers of the named modules, or make them exchange less often."""
        from torchtrim.executor.gradient_sync import changed

        return all_or_none(
            technique.where,
            lambda where: changed(where, module_at(roots, where), technique.options),
        )


TECHNIQUE = DataParallel()


def _settings(
    step: Step, profile: Profile, replica: Replica
) -> Iterator[tuple[tuple[str, int], Equivalence | None]]:
    exchange = exchange_of(step, replica)
    if exchange.copied and not replica.bucket_views:
        is_exact = not exchange.again or _mean_is_exact(profile)
        yield (VIEWS, True), None if is_exact else "ROUNDING"
    rounds = rounds_of(profile).rounds
    if rounds > 1 and _may_accumulate(step, profile, replica, exchange):
        yield (ACCUMULATE, rounds), "ROUNDING"
    order: Equivalence | None = None if ranks_of(profile) <= 2 else "ROUNDING"
    if rounds == 1 and (best := _best_cap(step, replica)) is not None:
        yield (CAP, best[0] // MIB), order
    searches = replica.find_unused and replica.unused_bytes and not replica.static_graph
    if searches and not accumulates_unexchanged(profile):
        yield (STATIC, True), order


def _as_views(step: Step, exchange: GradientExchange) -> Edit:
    copied = exchange.copied
    return Edit(
        drops=drops_of(step, (*copied, *exchange.old)),
        needs=tuple(Need(number, after_exchange(step, copy)) for number, copy in copied.items()),
        inserts=(_time_saving(step, sum(step.tasks[task].seconds for task in exchange.back)),),
    )


def _best_cap(step: Step, replica: Replica) -> tuple[int, float] | None:
    """Return the bucket size with the least exposed time, and the saved seconds, if it pays."""
    assert step.profile is not None
    overlap = overlap_of(step.profile, replica)
    if is_emulated(step.profile.device) or overlap is None:
        return None
    cap, saved = overlap.best_cap()
    return (cap, saved) if saved >= LEAST_CAP_SAVING * step.seconds else None


def _time_saving(step: Step, seconds: float) -> Insert:
    return Insert(len(step.tasks) - 1, -max(seconds, _LEAST_SECONDS), 0)


def _mean_is_exact(profile: Profile) -> bool:
    """Return True if dividing by the number of ranks equals multiplying by its reciprocal, bit for bit."""
    ranks = ranks_of(profile)
    return ranks & (ranks - 1) == 0


def _may_accumulate(
    step: Step, profile: Profile, replica: Replica, exchange: GradientExchange
) -> bool:
    """Return True if only backward reads gradients before the last of them is exchanged."""
    if replica.find_unused or exchange.old:
        return False
    last = max((one.operator for _, one in reduces_of(profile)), default=-1)
    gradients = set(exchange.copied)
    if any(
        task.phase != "backward" and gradients & {*task.reads, *task.writes}
        for task in step.tasks[: last + 1]
    ):
        return False
    return not any(
        one.name == "broadcast" and profile.operators[one.operator].phase == "forward"
        for one in profile.collectives
    )
