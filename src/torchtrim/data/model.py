"""What a loader with other settings would take, from the parts of one batch."""

from __future__ import annotations

from typing import NamedTuple

from torchtrim.records.loader import BatchParts, LoaderSettings

_QUEUE = 2e-4
"""Seconds that a batch from a worker costs whatever its size: two queues and a file descriptor."""


class Consumer(NamedTuple):
    """What is done with a batch: seconds of it when it is there, and how many cores that keeps busy."""

    seconds: float
    busy: float = 1.0


def batch_seconds(
    parts: BatchParts, settings: LoaderSettings, consumer: Consumer, cores: int
) -> float:
    """Seconds from batch to batch: the slowest of what goes on at once.

    Without workers all of it goes on one after the other. With workers it is the consumer, the workers, or
    the cores, which the workers share with it: reading takes none of them, all else does.
    """
    computing = _computing(parts, settings)
    work = computing + (0.0 if settings.whole else parts.reading)
    if not settings.workers:
        return consumer.seconds + work
    handing = parts.handing + _QUEUE
    shared = computing + consumer.seconds * min(consumer.busy, cores) + handing
    return max(
        consumer.seconds + handing, (work + _QUEUE) / settings.workers, shared / max(cores, 1)
    )


def enough_workers(parts: BatchParts, settings: LoaderSettings, consumer: Consumer) -> int:
    """The fewest workers that hide a batch's work behind what is done with the one before; at least 1."""
    computing = _computing(parts, settings)
    work = computing + (0.0 if settings.whole else parts.reading)
    hidden = max(consumer.seconds + parts.handing, 1e-9)
    return max(1, -int(-work // hidden))


def memory_bytes(parts: BatchParts, settings: LoaderSettings) -> int:
    """Bytes of the batches that are ready or being made, and of the one in use."""
    return parts.bytes * (settings.ahead + settings.workers + 1)


def _computing(parts: BatchParts, settings: LoaderSettings) -> float:
    """Seconds in which a core works for one batch; the whole time of a batch that is fetched as a whole."""
    if settings.whole and parts.whole is not None:
        return parts.whole
    return parts.decoding + parts.collating
