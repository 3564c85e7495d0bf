"""A machine that counts what a loader takes. It shares no code with the model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random

from torchtrim.data.model import Consumer
from torchtrim.data.search import window
from torchtrim.records.loader import BatchParts, LoaderSettings

EPSILON = 1e-9


def parts(
    reading: float = 0.0, decoding: float = 0.0, collating: float = 0.0, **more: float
) -> BatchParts:
    given = {"samples": 16, "bytes": 1 << 20, **more}
    return BatchParts(reading=reading, decoding=decoding, collating=collating, **given)  # type: ignore[arg-type]


class Machine:
    """Counts what a loader would take, batch by batch.

    No batch is quite like another: each takes up to a tenth more or less. All that compute share the
    cores; batches are taken from the workers in turn, each of which is no further ahead than its queue.
    """

    def __init__(self, batch: BatchParts, consumer: Consumer, cores: int) -> None:
        self.batch, self.consumer, self.cores = batch, consumer, cores
        self.seconds = 0.0
        self._random = Random(7)

    def _uneven(self, *seconds: float) -> list[float]:
        return [one * self._random.uniform(0.9, 1.1) for one in seconds]

    def rate(self, settings: LoaderSettings) -> float:
        """Seconds from batch to batch in the long run."""
        dropped, _ = window(settings)
        taken = Machine(self.batch, self.consumer, self.cores).run(settings, dropped, 96)
        return sum(taken) / len(taken)

    def run(self, settings: LoaderSettings, dropped: int, timed: int) -> list[float]:
        """Seconds from batch to batch."""
        arrivals = list(itertools.islice(self._arrivals(settings), dropped + timed + 1))
        self.seconds += arrivals[-1]
        taken = [b - a for a, b in itertools.pairwise(arrivals)]
        return taken[dropped:]

    def _arrivals(self, settings: LoaderSettings) -> Iterator[float]:
        batch, consumer = self.batch, self.consumer
        whole = settings.whole and batch.whole is not None
        waits = 0.0 if whole else batch.reading
        computes = batch.whole if whole else batch.decoding + batch.collating
        assert computes is not None
        now = 0.0
        if not settings.workers:
            while True:
                yield now
                now += sum(self._uneven(waits + computes, consumer.seconds))
        left = [self._uneven(waits, computes) for _ in range(settings.workers)]
        ready = [0] * settings.workers
        using, turn = 0.0, 0
        yield now
        while True:
            if using <= EPSILON and ready[turn]:
                ready[turn] -= 1
                turn = (turn + 1) % settings.workers
                using = consumer.seconds + batch.handing
                yield now
            working = [
                one for one, full in zip(left, ready, strict=True) if full < settings.prefetch
            ]
            computing = [one for one in working if one[0] <= EPSILON]
            cores = len(computing) + (using > EPSILON) * consumer.busy
            share = min(1.0, self.cores / max(cores, 1e-9))
            ends = [one[0] or one[1] / share for one in working]
            ends += [using / share] if using > EPSILON else []
            passes = min(ends, default=0.0)
            now += passes
            using -= passes * share
            for one in working:
                part = one[0] <= EPSILON
                one[part] = max(one[part] - passes * (share if part else 1.0), 0.0)
                one[0] = 0.0 if one[0] <= EPSILON else one[0]
            for worker, one in enumerate(left):
                if max(one) <= EPSILON:
                    ready[worker] += 1
                    left[worker] = self._uneven(waits, computes)
