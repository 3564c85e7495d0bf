"""Data parallel: `DistributedDataParallel` exchanges gradients once a step, and keeps them once.

With `gradient_as_bucket_view` the gradients are views of the buckets in which they travel. By default each is
there twice, as `parameter.grad` and in its bucket, and is copied from one to the other and back. The numbers
are the same bit for bit. On a number of ranks that is no power of two, where a step exchanges more than once
or keeps its gradients (`zero_grad(set_to_none=False)`), the mean divides where it multiplied by the
reciprocal, and they are equal up to rounding.

With `accumulate = 4` only the fourth micro-batch of a step exchanges, as inside `model.no_sync()`; by default
each does, since `DistributedDataParallel` cannot know which one is the last. The ranks' sums are added once
instead of micro-batch by micro-batch: equal up to rounding, and gradients are of one rank alone until then.
It is not planned where something else reads gradients before the last exchange, where buffers are broadcast
in each forward, or with `find_unused_parameters`. A step of fewer micro-batches, as at the end of an epoch,
is refused as soon as it is seen, in the next forward: every rank then raises.

With `bucket_cap_mb = 4` gradients travel in buckets of 4 MiB: smaller ones begin earlier, larger ones take
less time together. A size is planned where the exchanges of the recorded step, each a latency and a time for
each byte, would outlast backward for less time, by 2 % of the step at least. On two ranks the numbers are the
same bit for bit; on more, sums may be added up in another order.

With `static_graph` a module with `find_unused_parameters` looks for unused parameters in its first step
alone, and arranges its buckets in the order in which gradients come. It is planned where parameters were
unused and each forward is followed by an exchange, not inside `no_sync`; where none were unused, leave the
search out (TT603). A step that uses other parameters than the first one is refused by
`DistributedDataParallel` itself. The same numbers as with another size of buckets.

All take effect in the instance that the script has made, before its next forward: its reducer is made anew
from its settings, as it is when a module is unpickled. Reverting makes it anew as it was. Communication
hooks of the script's own, mixed precision of `DistributedDataParallel` and delayed exchanges are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchtrim.executor.places import module_at
from torchtrim.executor.registry import Handle, Option, all_or_none
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Profile, Replica, is_emulated
from torchtrim.step.buckets import LEAST_SHARE, MIB, overlap_of
from torchtrim.step.edits import NOTHING, Drop, Edit, Insert, Need
from torchtrim.step.exchanges import (
    Exchange,
    after_exchange,
    exchange_of,
    ranks_of,
    reduces_of,
    rounds_of,
    waits,
)
from torchtrim.step.step import Step

VIEWS, ACCUMULATE = "gradient_as_bucket_view", "accumulate"
CAP, STATIC = "bucket_cap_mb", "static_graph"
_LEAST_SECONDS = 1e-9


class DataParallel:
    """`where` names modules in `DistributedDataParallel`. `gradient_as_bucket_view`: true; or `accumulate`:
    how many micro-batches a step has; or `bucket_cap_mb`: MiB of a bucket; or `static_graph`: true."""

    name = "data_parallel"
    takes = (VIEWS, ACCUMULATE, CAP, STATIC)
    equivalence: Equivalence = "BITWISE"

    def options(self, step: Step) -> Sequence[Option]:
        """Views for each replica that has none, fewer exchanges where a step has too many, buckets of another
        size where exchanges outlast backward, and one search for unused parameters instead of many."""
        if step.profile is None:
            return []
        return [one for replica in step.profile.replicas for one in self._of(step, replica)]

    def _of(self, step: Step, replica: Replica) -> Iterator[Option]:
        profile = step.profile
        assert profile is not None
        where = profile.modules[replica.module].path
        exchange = exchange_of(step, replica)
        if exchange.copied and not replica.bucket_views:
            less: Equivalence | None = (
                "ROUNDING" if exchange.again and not _halves(profile) else None
            )
            yield Option(self.name, where, (), None, ((VIEWS, True),), less)
        rounds = rounds_of(profile)
        if rounds.rounds > 1 and _may_wait(step, replica, exchange):
            yield Option(self.name, where, (), None, ((ACCUMULATE, rounds.rounds),), "ROUNDING")
        order: Equivalence | None = None if ranks_of(profile) <= 2 else "ROUNDING"
        found = _best_cap(step, replica) if rounds.rounds == 1 else None
        if found is not None:
            yield Option(self.name, where, (), None, ((CAP, found[0] // MIB),), order)
        searches = replica.find_unused and replica.unused_bytes and not replica.static_graph
        if searches and not waits(profile):
            yield Option(self.name, where, (), None, ((STATIC, True),), order)

    def edits(self, step: Step, option: Option) -> Edit | None:
        """Gradients end where their bucket has them; or exchanges do not block."""
        profile = step.profile
        if profile is None:
            return None
        replica = next(
            r for r in profile.replicas if profile.modules[r.module].path == option.where
        )
        changed = dict(option.settings)
        if VIEWS in changed:
            return _as_views(step, exchange_of(step, replica))
        if CAP in changed:
            found = _best_cap(step, replica)
            return None if found is None else _quicker(step, found[1])
        return _quicker(step, 0.0 if STATIC in changed else rounds_of(profile).needless_seconds)

    def apply(self, roots: Mapping[str, Any], technique: Technique) -> Handle:
        """Make the reducers of the named modules anew, or have them exchange less often."""
        from torchtrim.executor.gradient_sync import changed

        return all_or_none(
            technique.where,
            lambda where: changed(where, module_at(roots, where), technique.options),
        )


TECHNIQUE = DataParallel()


def _as_views(step: Step, exchange: Exchange) -> Edit:
    copied = exchange.copied
    return Edit(
        drops=tuple(
            Drop(number, hold)
            for number in (*copied, *exchange.old)
            for hold in range(len(step.tensors[number].holds))
        ),
        needs=tuple(Need(number, after_exchange(step, copy)) for number, copy in copied.items()),
        inserts=(_saved(step, sum(step.tasks[task].seconds for task in exchange.back)),),
    )


def _quicker(step: Step, seconds: float) -> Edit:
    return NOTHING._replace(inserts=(_saved(step, seconds),))


def _best_cap(step: Step, replica: Replica) -> tuple[int, float] | None:
    """The bytes of a bucket that expose least, and the seconds that they save; None for those of now."""
    assert step.profile is not None
    if is_emulated(step.profile.device):
        return None
    found = overlap_of(step.profile, replica)
    if found is None:
        return None
    cap, saved = found.best_cap()
    return (cap, saved) if saved >= LEAST_SHARE * step.seconds else None


def _saved(step: Step, seconds: float) -> Insert:
    """Time that a step does not take any more."""
    return Insert(len(step.tasks) - 1, -max(seconds, _LEAST_SECONDS), 0)


def _halves(profile: Profile) -> bool:
    """Whether dividing by the number of ranks is multiplying by its reciprocal, to the bit."""
    ranks = ranks_of(profile)
    return ranks & (ranks - 1) == 0


def _may_wait(step: Step, replica: Replica, exchange: Exchange) -> bool:
    """Whether nothing but backward looks at gradients before the last of them is exchanged."""
    profile = step.profile
    assert profile is not None
    if replica.find_unused or exchange.old:
        return False
    last = max((one.operator for _, one in reduces_of(profile)), default=-1)
    gradients = set(exchange.copied)
    for task in step.tasks[: last + 1]:
        if task.phase != "backward" and gradients & {*task.reads, *task.writes}:
            return False
    return not any(
        one.name == "broadcast" and profile.operators[one.operator].phase == "forward"
        for one in profile.collectives
    )
