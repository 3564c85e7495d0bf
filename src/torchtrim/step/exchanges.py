"""How a module in `DistributedDataParallel` exchanges its gradients in a step: copies, buckets, rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from torchtrim.records.profile import Collective, Profile, Replica
from torchtrim.step.job import blocked_seconds
from torchtrim.step.step import Step

REDUCES = "allreduce"
_COLLECTIVES = "c10d::"


class Exchange(NamedTuple):
    """The gradients of one replica, and the tasks that carry them to their buckets and back.

    `copied`: for each gradient made in the step, the first task that copies it into a bucket. `old`:
    gradients from before the step. `back`: the tasks that copy a bucket into a gradient. `again`: a gradient
    is copied more than once, or is from before the step.
    """

    copied: dict[int, int]
    old: tuple[int, ...]
    back: tuple[int, ...]
    again: bool


class Rounds(NamedTuple):
    """How often a step exchanges all gradients: `rounds`, 0 for no replica.

    `all_bytes`: of all rounds, `once_bytes` of one. `needless_seconds`: for how long all but the last block
    the rank.
    """

    rounds: int
    all_bytes: int
    once_bytes: int
    needless_seconds: float


def exchange_of(step: Step, replica: Replica) -> Exchange:
    """How the gradients of a replica's parameters travel."""
    profile = step.profile
    assert profile is not None
    buckets = {
        use.storage
        for _, one in reduces_of(profile)
        for use in profile.operators[one.operator].inputs
    }
    gradients = {
        number
        for number, storage in enumerate(profile.storages)
        if storage.kind == "gradient" and _is_of(profile, replica, storage.name)
    } - buckets
    copied: dict[int, int] = {}
    copies: Counter[int] = Counter()
    back = []
    for number, task in enumerate(step.tasks):
        if task.phase != "backward" or task.name.startswith(_COLLECTIVES):
            continue
        reads, writes = set(task.reads), set(task.writes)
        if writes & buckets:
            for gradient in (reads & gradients) - writes:
                copied.setdefault(gradient, number)
                copies[gradient] += 1
        elif reads & buckets and writes & gradients:
            back.append(number)
    old = tuple(number for number in sorted(gradients) if profile.storages[number].birth < 0)
    again = bool(old) or max(copies.values(), default=0) > 1
    return Exchange(copied, old, tuple(back), again)


def after_exchange(step: Step, copy: int) -> int:
    """The task from which on a gradient is not held any more that task `copy` has put into its bucket.

    Autograd lets go of it when the hook returns, which may have begun the bucket's exchange.
    """
    following = copy + 1
    while following < len(step.tasks) and step.tasks[following].name.startswith(_COLLECTIVES):
        following += 1
    return following


def rounds_of(profile: Profile) -> Rounds:
    """The rounds of exchanges of a step that adds up as many gradients; one where it does not."""
    gradients = sum(replica.gradient_bytes for replica in profile.replicas)
    exchanged = [*reduces_of(profile)]
    total = sum(one.bytes for _, one in exchanged)
    count = round(total / gradients) if gradients else 0
    if count < 2 or _most_added(profile) < count:
        return Rounds(min(count, 1), total, gradients, 0.0)
    blocked = blocked_seconds(profile)
    needless = [*_without_last(exchanged, gradients)]
    return Rounds(count, total, gradients, sum(blocked[number] for number in needless))


def waits(profile: Profile) -> bool:
    """Whether a step adds gradients up without an exchange, as inside `no_sync`."""
    return _most_added(profile) > max(rounds_of(profile).rounds, 1)


def reduces_of(profile: Profile) -> Iterator[tuple[int, Collective]]:
    """The sums over ranks that backward issues, with their numbers."""
    for number, one in enumerate(profile.collectives):
        if profile.operators[one.operator].phase == "backward" and one.name == REDUCES:
            yield number, one


def ranks_of(profile: Profile) -> int:
    """How many ranks exchange gradients; those of the job where that is unknown."""
    return max((one.ranks for _, one in reduces_of(profile)), default=0) or profile.world


def _is_of(profile: Profile, replica: Replica, name: str) -> bool:
    return name.startswith(f"{profile.modules[replica.module].path}.")


def _most_added(profile: Profile) -> int:
    """How often the step adds to a gradient, the most of all."""
    steps = profile.optimizer_steps
    return max((update.added for step in steps for update in step.updates), default=0)


def _without_last(exchanged: list[tuple[int, Collective]], gradients: int) -> Iterator[int]:
    """All exchanges but those of the last round."""
    left = sum(one.bytes for _, one in exchanged) - gradients
    for number, one in exchanged:
        if left <= 0:
            return
        left -= one.bytes
        yield number
