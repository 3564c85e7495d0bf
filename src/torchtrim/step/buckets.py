"""How long exchanges of gradients outlast backward, for buckets of one size or another.

A bucket is exchanged when the last of its gradients is there, one bucket after the other, as in Li et al.,
PyTorch Distributed, VLDB 2020, sections 3.2.3 and 4.2. An exchange takes a latency and a time for each byte,
which are fitted to those that were recorded.
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

    `cap`: the size of its buckets now, in bytes.
    """

    gradients: tuple[Ready, ...]
    end: float
    cap: int
    link: Link

    def exposed_seconds(self, cap: int, *, width: float = 1.0) -> float:
        """For how long exchanges go on after backward, with buckets of `cap` bytes.

        `width`: the bytes that travel, as a share of a gradient's.
        """
        free = 0.0
        for bucket in in_buckets(self.gradients, cap):
            free = max(free, bucket.seconds) + self.link.seconds(int(bucket.bytes * width))
        return max(free - self.end, 0.0)

    def best_cap(self) -> tuple[int, float]:
        """The size of buckets that exposes least, and how many seconds it saves; the size now where none
        does."""
        now = self.exposed_seconds(self.cap)
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
    return Overlap(gradients, max(ends), replica.bucket_bytes, link)


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


def in_buckets(gradients: Sequence[Ready], cap: int) -> Iterator[Ready]:
    """When each bucket is full. As `DistributedDataParallel` fills them: one is closed that has reached
    `cap` bytes."""
    size = 0
    for one in gradients:
        size += one.bytes
        if size >= cap:
            yield Ready(one.seconds, size)
            size = 0
    if size:
        yield Ready(gradients[-1].seconds, size)


def _gradients(profile: Profile, replica: Replica) -> Iterator[Ready]:
    prefix = f"{profile.modules[replica.module].path}."
    for step in profile.optimizer_steps:
        for update in step.updates:
            parameter = profile.storages[update.parameter]
            if parameter.name.startswith(prefix) and 0 <= update.ready < len(profile.operators):
                yield Ready(profile.operators[update.ready].start, parameter.bytes)
