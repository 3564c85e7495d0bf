"""Gradient exchange of `DistributedDataParallel`: copies, buckets, rounds, and the overlap with backward.

A bucket is exchanged when the last of its gradients is ready, one bucket after the other, as in Li et al.,
PyTorch Distributed, VLDB 2020, sections 3.2.3 and 4.2. An exchange takes a latency and a time per byte, both
fitted to the recorded exchanges. Torch's first bucket has 1 MiB by default (`_DEFAULT_FIRST_BUCKET_BYTES`),
for the gradients ready first, or ready last if the module searches for unused parameters.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchtrim.records.profile import Collective, Profile, Replica
from torchtrim.step.job import blocked_seconds
from torchtrim.step.lanes import LaneTask, run_lanes
from torchtrim.step.step import Step

REDUCES = "allreduce"  # Name of the collective that sums gradients.
_COLLECTIVES = "c10d::"


class GradientExchange(NamedTuple):
    """The gradients of one replica, and the tasks that copy them to their buckets and back.

    `copied`: for each gradient made in the step, the first task that copies it into a bucket. `old`:
    gradients from before the step. `back`: the tasks that copy a bucket into a gradient. `again`: True if a
    gradient is copied more than once or is older than the step.
    """

    copied: dict[int, int]
    old: tuple[int, ...]
    back: tuple[int, ...]
    again: bool


class Rounds(NamedTuple):
    """How often a step exchanges all gradients: `rounds`, or 0 without a replica.

    `all_bytes`: of all rounds; `once_bytes`: of one. `needless_seconds`: time blocked before the last round.
    """

    rounds: int
    all_bytes: int
    once_bytes: int
    needless_seconds: float


def exchange_of(step: Step, replica: Replica) -> GradientExchange:
    """Return how the gradients of a replica's parameters reach their buckets and return."""
    profile = step.profile
    assert profile is not None
    prefix = f"{profile.modules[replica.module].path}."
    buckets = {
        use.storage
        for _, reduce in reduces_of(profile)
        for use in profile.operators[reduce.operator].inputs
    }
    gradients = {
        number
        for number, storage in enumerate(profile.storages)
        if storage.kind == "gradient" and storage.name.startswith(prefix)
    } - buckets
    copied: dict[int, int] = {}
    back = []
    old = tuple(number for number in sorted(gradients) if profile.storages[number].birth < 0)
    again = bool(old)
    for number, task in enumerate(step.tasks):
        if task.phase != "backward" or task.name.startswith(_COLLECTIVES):
            continue
        reads, writes = set(task.reads), set(task.writes)
        if writes & buckets:
            for gradient in (reads & gradients) - writes:
                again = again or gradient in copied
                copied.setdefault(gradient, number)
        elif reads & buckets and writes & gradients:
            back.append(number)
    return GradientExchange(copied, old, tuple(back), again)


def after_exchange(step: Step, copy: int) -> int:
    """Return the first task after autograd frees a gradient that task `copy` copied into its bucket.

    Autograd frees it when the hook returns, which may have started the exchange of the bucket.
    """
    following = copy + 1
    while following < len(step.tasks) and step.tasks[following].name.startswith(_COLLECTIVES):
        following += 1
    return following


def rounds_of(profile: Profile) -> Rounds:
    """Return the rounds of a step; more than one only if the step accumulates as many gradients."""
    gradients = sum(replica.gradient_bytes for replica in profile.replicas)
    exchanged = [*reduces_of(profile)]
    total = sum(reduce.bytes for _, reduce in exchanged)
    count = round(total / gradients) if gradients else 0
    if count < 2 or _most_added(profile) < count:
        return Rounds(min(count, 1), total, gradients, 0.0)
    blocked = blocked_seconds(profile)
    needless, left = 0.0, total - gradients
    for number, reduce in exchanged:
        if left > 0:
            needless += blocked[number]
            left -= reduce.bytes
    return Rounds(count, total, gradients, needless)


def accumulates_unexchanged(profile: Profile) -> bool:
    """Return True if a step accumulates gradients without an exchange, as inside `no_sync`."""
    return _most_added(profile) > max(rounds_of(profile).rounds, 1)


def reduces_of(profile: Profile) -> Iterator[tuple[int, Collective]]:
    """Yield the sums over ranks that backward issues, with their numbers."""
    for number, collective in enumerate(profile.collectives):
        phase = profile.operators[collective.operator].phase
        if phase == "backward" and collective.name == REDUCES:
            yield number, collective


def ranks_of(profile: Profile) -> int:
    """Return how many ranks exchange gradients, or the size of the job if that is unknown."""
    return max((reduce.ranks for _, reduce in reduces_of(profile)), default=0) or profile.world


def _most_added(profile: Profile) -> int:
    steps = profile.optimizer_steps
    return max((update.added for step in steps for update in step.updates), default=0)


MIB = 2**20
# Bucket sizes to compare, in bytes; 25 MiB is torch's default.
BUCKET_CAPS = (1 * MIB, 4 * MIB, 16 * MIB, 25 * MIB, 64 * MIB, 256 * MIB)
LEAST_CAP_SAVING = (
    0.02  # Share of a step that a bucket size must save; recorded times vary as much.
)


class ExchangeCost(NamedTuple):
    """Cost of an exchange: `latency` seconds, and `per_byte` seconds for each byte."""

    latency: float
    per_byte: float

    def seconds(self, size: int) -> float:
        """Return the seconds for `size` bytes."""
        return self.latency + self.per_byte * size


class ReadyGradient(NamedTuple):
    """Bytes that are ready for exchange `seconds` after the start of the step."""

    seconds: float
    bytes: int


class Overlap(NamedTuple):
    """Gradients of a replica in the order of backward, and the end of backward in seconds.

    `cap`: the current bucket size in bytes; `first`: the size of the first bucket. `rebuilt`: buckets are
    filled in the order of readiness, and not in the order of the parameters.
    """

    gradients: tuple[ReadyGradient, ...]
    end: float
    cap: int
    link: ExchangeCost
    first: int = 0
    rebuilt: bool = True

    def exposed_now(self, *, width: float = 1.0) -> float:
        """Return how long exchanges outlast backward, with the current buckets."""
        return self.exposed_seconds(self.cap, self.first, width)

    def exposed_seconds(self, cap: int, first: int = 0, width: float = 1.0) -> float:
        """Return how long exchanges outlast backward, with buckets of `cap` bytes, or `first` for the first.

        `width`: the exchanged bytes as a share of the bytes of the gradients.
        """
        buckets = in_buckets(self.gradients, cap, first or cap, rebuilt=self.rebuilt)
        tasks = [
            LaneTask(number, self.link.seconds(int(bucket.bytes * width)), earliest=bucket.seconds)
            for number, bucket in enumerate(buckets)
        ]
        last = max((end for _, end in run_lanes([tasks]).values()), default=0.0)
        return max(last - self.end, 0.0)

    def best_cap(self) -> tuple[int, float]:
        """Return the bucket size with the least exposed time, possibly the current, and the saved seconds."""
        now = self.exposed_now()
        best = min(BUCKET_CAPS, key=self.exposed_seconds)
        saved = now - self.exposed_seconds(best)
        return (best, saved) if saved > 0 else (self.cap, 0.0)


def overlap_of(profile: Profile, replica: Replica) -> Overlap | None:
    """Return how a replica's exchanges overlap with backward, or None if the profile lacks the data.

    It needs exchanges of at least two sizes, and an optimizer whose gradients have known times.
    """
    link = exchange_cost_of(profile)
    gradients = tuple(sorted(_gradients(profile, replica)))
    ends = [op.start + op.seconds for op in profile.operators if op.phase == "backward"]
    if link is None or not gradients or not ends:
        return None
    rebuilt = replica.static_graph or not replica.find_unused
    return Overlap(gradients, max(ends), replica.bucket_bytes, link, replica.first_bytes, rebuilt)


def exchange_cost_of(profile: Profile) -> ExchangeCost | None:
    """Return the latency and time per byte of the recorded gradient exchanges, by least squares."""
    known = [(r.bytes, r.seconds) for _, r in reduces_of(profile) if r.seconds is not None]
    sizes, seconds = [size for size, _ in known], [took for _, took in known]
    if len(set(sizes)) < 2:
        return None
    per_byte, latency = statistics.linear_regression(sizes, seconds)
    if per_byte <= 0:
        return None
    if latency < 0:
        return ExchangeCost(0.0, sum(seconds) / sum(sizes))
    return ExchangeCost(latency, per_byte)


def in_buckets(
    gradients: Sequence[ReadyGradient], cap: int, first: int, *, rebuilt: bool = True
) -> list[ReadyGradient]:
    """Return when each bucket is full, in the order of exchange.

    Buckets fill as in `DistributedDataParallel`: up to `cap` bytes, or `first` for the first one. If they are
    not `rebuilt`, the first bucket has the gradients that are ready last, and is exchanged last.
    """
    filled = list(_filled(gradients if rebuilt else gradients[::-1], cap, first))
    return filled if rebuilt else filled[::-1]


def _filled(gradients: Sequence[ReadyGradient], cap: int, first: int) -> Iterator[ReadyGradient]:
    size, ready, limit = 0, 0.0, first
    for gradient in gradients:
        size, ready = size + gradient.bytes, max(ready, gradient.seconds)
        if size >= limit:
            yield ReadyGradient(ready, size)
            size, ready, limit = 0, 0.0, cap
    if size:
        yield ReadyGradient(ready, size)


def _gradients(profile: Profile, replica: Replica) -> Iterator[ReadyGradient]:
    prefix = f"{profile.modules[replica.module].path}."
    for step in profile.optimizer_steps:
        for update in step.updates:
            parameter = profile.storages[update.parameter]
            if parameter.name.startswith(prefix) and 0 <= update.ready < len(profile.operators):
                yield ReadyGradient(profile.operators[update.ready].start, parameter.bytes)
