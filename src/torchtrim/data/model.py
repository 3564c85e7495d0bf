"""Model of a loader's batch time under other settings, from the parts of one batch."""

from __future__ import annotations

from typing import NamedTuple

from torchtrim.records.loader import BatchParts, LoaderSettings

_QUEUE = 2e-4  # Fixed seconds of a batch from a worker: two queues and a file descriptor.


class Consumer(NamedTuple):
    """Work done with a batch: its seconds, and the number of cores it keeps busy."""

    seconds: float
    busy: float = 1.0


def batch_seconds(
    parts: BatchParts, settings: LoaderSettings, consumer: Consumer, cores: int
) -> float:
    """Return the seconds from batch to batch: the slowest of the concurrent stages.

    Without workers the stages run one after another. With workers the limit is the consumer, the workers, or
    the cores they share with the consumer. Reading uses no core; everything else does.
    """
    computing, work = _computing(parts, settings)
    if not settings.workers:
        return consumer.seconds + work
    handing = parts.handing + _QUEUE
    shared = computing + consumer.seconds * min(consumer.busy, cores) + handing
    return max(
        consumer.seconds + handing, (work + _QUEUE) / settings.workers, shared / max(cores, 1)
    )


def enough_workers(parts: BatchParts, settings: LoaderSettings, consumer: Consumer) -> int:
    """Return the fewest workers that hide loading behind the consumer, at least 1."""
    _, work = _computing(parts, settings)
    hidden = max(consumer.seconds + parts.handing, 1e-9)
    return max(1, -int(-work // hidden))


def memory_bytes(parts: BatchParts, settings: LoaderSettings) -> int:
    """Return the bytes of batches that are ready, being loaded, or in use."""
    return parts.bytes * (settings.ahead + settings.workers + 1)


def _computing(parts: BatchParts, settings: LoaderSettings) -> tuple[float, float]:
    """Return the seconds of one batch on a core, without and with reading.

    If a batch is fetched in one call, everything counts as computing.
    """
    own = parts.decoding + parts.collating
    computing = parts.whole if settings.whole and parts.whole is not None else own
    return computing, computing + (0.0 if settings.whole else parts.reading)
