"""How long exchanges of gradients outlast backward, for buckets of one size or another.

A bucket is exchanged when the last of its gradients is there, one bucket after the other, as in Li et al.,
PyTorch Distributed, VLDB 2020, sections 3.2.3 and 4.2. An exchange takes a latency and a time for each byte,
which are fitted to those that were recorded. Where a script sets no size, torch's first bucket is of 1 MiB
(`torch.distributed._DEFAULT_FIRST_BUCKET_BYTES`): the first to be ready, or, where unused parameters are
looked for, that of the model's first parameters, which is ready last.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchtrim.records.profile import Profile, Replica
from torchtrim.step.exchanges import reduces_of

MIB = 2**20
CAPS = (1 * MIB, 4 * MIB, 16 * MIB, 25 * MIB, 64 * MIB, 256 * MIB)
"""Sizes of buckets that are compared, in bytes; 25 MiB is torch's own."""
LEAST_SHARE = 0.02
"""Of a step: what another size of buckets has to save. Recorded times are no better than that."""


class Link(NamedTuple):
    """What an exchange takes: `latency` seconds, and `per_byte` for each byte."""

    latency: float
    per_byte: float

    def seconds(self, size: int) -> float:
        """Seconds for so many bytes."""
        return self.latency + self.per_byte * size


class Ready(NamedTuple):
    """Bytes that may be exchanged from `seconds` after the step's start on."""

    seconds: float
    bytes: int


class Overlap(NamedTuple):
    """Gradients of a replica in the order in which backward makes them, and when it ends, in seconds.

    `cap`: the size of its buckets now, in bytes; `first`: of the first one. `rebuilt`: they are filled in the
    order in which gradients are ready, else in that of the parameters.
    """

    gradients: tuple[Ready, ...]
    end: float
    cap: int
    link: Link
    first: int = 0
    rebuilt: bool = True

    def exposed_seconds(self, cap: int) -> float:
        """For how long exchanges go on after backward, with buckets of `cap` bytes, the first one too."""
        return self._exposed(cap, cap, 1.0)

    def exposed_now(self, *, width: float = 1.0) -> float:
        """For how long they do with the buckets that there are.

        `width`: the bytes that travel, as a share of a gradient's.
        """
        return self._exposed(self.cap, self.first or self.cap, width)

    def _exposed(self, cap: int, first: int, width: float) -> float:
        free = 0.0
        for bucket in in_buckets(self.gradients, cap, first, rebuilt=self.rebuilt):
            free = max(free, bucket.seconds) + self.link.seconds(int(bucket.bytes * width))
        return max(free - self.end, 0.0)

    def best_cap(self) -> tuple[int, float]:
        """The size of buckets that exposes least, and how many seconds it saves; the size now where none
        does."""
        now = self.exposed_now()
        best = min(CAPS, key=self.exposed_seconds)
        saved = now - self.exposed_seconds(best)
        return (best, saved) if saved > 0 else (self.cap, 0.0)


def overlap_of(profile: Profile, replica: Replica) -> Overlap | None:
    """How a replica's exchanges overlap with backward; None where the profile does not tell.

    That needs exchanges of two sizes at least, and an optimizer, which knows when its gradients were there.
    """
    link = link_of(profile)
    gradients = tuple(sorted(_gradients(profile, replica)))
    ends = [op.start + op.seconds for op in profile.operators if op.phase == "backward"]
    if link is None or not gradients or not ends:
        return None
    rebuilt = replica.static_graph or not replica.find_unused
    return Overlap(gradients, max(ends), replica.bucket_bytes, link, replica.first_bytes, rebuilt)


def link_of(profile: Profile) -> Link | None:
    """Latency and time for each byte of the recorded exchanges of gradients, by least squares."""
    known = [(one.bytes, one.seconds) for _, one in reduces_of(profile) if one.seconds is not None]
    sizes, seconds = [size for size, _ in known], [took for _, took in known]
    if len(set(sizes)) < 2:
        return None
    per_byte, latency = statistics.linear_regression(sizes, seconds)
    if per_byte <= 0:
        return None
    if latency < 0:
        return Link(0.0, sum(seconds) / sum(sizes))
    return Link(latency, per_byte)


def in_buckets(
    gradients: Sequence[Ready], cap: int, first: int, *, rebuilt: bool = True
) -> list[Ready]:
    """When each bucket is full, in the order in which they are exchanged.

    As `DistributedDataParallel` fills them: one is closed that has `cap` bytes, the first one `first`.
    Where they are not `rebuilt` the first one has the gradients that are ready last, and is exchanged last.
    """
    filled = list(_filled(gradients if rebuilt else gradients[::-1], cap, first))
    return filled if rebuilt else filled[::-1]


def _filled(gradients: Sequence[Ready], cap: int, first: int) -> Iterator[Ready]:
    size, ready, limit = 0, 0.0, first
    for one in gradients:
        size, ready = size + one.bytes, max(ready, one.seconds)
        if size >= limit:
            yield Ready(ready, size)
            size, ready, limit = 0, 0.0, cap
    if size:
        yield Ready(ready, size)


def _gradients(profile: Profile, replica: Replica) -> Iterator[Ready]:
    prefix = f"{profile.modules[replica.module].path}."
    for step in profile.optimizer_steps:
        for update in step.updates:
            parameter = profile.storages[update.parameter]
            if parameter.name.startswith(prefix) and 0 <= update.ready < len(profile.operators):
                yield Ready(profile.operators[update.ready].start, parameter.bytes)
