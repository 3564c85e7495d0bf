"""Search over loader settings: proposes settings, takes their timings, and decides when to stop."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from torchtrim.core.units import format_apart
from torchtrim.data.model import Consumer, batch_seconds, memory_bytes
from torchtrim.records.loader import BatchParts, LoaderSettings, MeasuredSettings

_PREFETCHES = (1, 2, 4)  # Arbitrary; four batches ahead even out most samples.
_WINDOW = 12  # Arbitrary; a run of a dozen batches has a median that one slow batch does not move.
_MOST_BATCHES = 48  # Arbitrary; with more, a run would discard most of the batches it reads.
_CLOSE = 1.3  # Arbitrary; settings that the model foresees to be slower are not tried.
_MOST_TRIED = 3  # Arbitrary; each setting costs seconds.
_DONE = 1.03  # As _BETTER, on the other side.
_BETTER = 0.97  # Arbitrary; less is within the spread of runs, and no gain.
_PROMISING = 0.9  # Arbitrary; a smaller gain is not foreseen surely enough.
_UNEVEN = 0.5  # A deviation of half the mean: a longer queue evens samples out.
_SLOWER = 1.1  # More than a tenth off what was foreseen, workers stand idle.
_EMPTIED = 2.0  # With twice the consumer's time for a batch the queue is empty soon.


class SearchLimits(NamedTuple):
    """Limits of a search: cores for workers and consumer, and bytes of prefetched batches or None."""

    cores: int
    memory: int | None = None
    pins: bool = False


class SettingsSearch:
    """Search for the settings with the shortest time from batch to batch.

    `now` holds the loader's current settings. `ask` proposes settings, and `tell` takes their batch times;
    `window` says how many batches to drop and to time. A model of the batch's parts selects the settings
    worth trying: at most three settings predicted within 30 % of the best, plus no workers, which no model
    of processes can get wrong. If samples are uneven, or a run was slower than predicted, more prefetching
    is tried too.
    """

    def __init__(
        self, parts: BatchParts, now: LoaderSettings, consumer: Consumer, limits: SearchLimits
    ) -> None:
        self.parts = parts
        self.now = now
        self.consumer = consumer
        self.limits = limits
        self.tried: list[MeasuredSettings] = []
        self.skipped: list[str] = []
        self._ranked: list[LoaderSettings] = []
        self._left = self._settings()
        self._asked: LoaderSettings | None = None

    def ask(self) -> LoaderSettings | None:
        """Return the settings to try next, or None if no others promise more."""
        if self.tried and self._is_done():
            return None
        self._asked = next(self._left, None)
        return self._asked

    def tell(self, seconds: Sequence[float]) -> None:
        """Record the batch times of a run, without the dropped batches."""
        assert self._asked is not None
        taken = statistics.fmean(seconds)
        run = MeasuredSettings(settings=self._asked, seconds=taken, batches=len(seconds))
        self.tried.append(run)

    def window(self, settings: LoaderSettings) -> tuple[int, int]:
        """Return how many batches of a run to drop and how many to time.

        If batches take twice as long as the consumer, only the first of each worker is prefetched.
        """
        dropped, timed = window(settings)
        if self.foreseen(settings) >= _EMPTIED * self.consumer.seconds:
            dropped = min(dropped, settings.workers or 1)
        return dropped, timed

    @property
    def best(self) -> MeasuredSettings:
        """The fastest allowed setting. Ties keep the current one."""
        allowed = [one for one in self.tried if self._allowed(one.settings)] or self.tried
        quickest = min(allowed, key=lambda one: one.seconds)
        kept = self.tried[0]
        same = kept in allowed and quickest.seconds > _BETTER * kept.seconds
        return kept if same else quickest

    def _is_done(self) -> bool:
        promised = self.foreseen(self.ranked()[0]) < _PROMISING * self.foreseen(self.now)
        share = self.best.seconds / max(self.consumer.seconds, 1e-9)
        return _BETTER <= share <= _DONE and (len(self.tried) > 1 or not promised)

    def _settings(self) -> Iterator[LoaderSettings]:
        yield self.now
        ranked = self.ranked()
        border = _CLOSE * self.foreseen(ranked[0])
        near = [one for one in ranked[:_MOST_TRIED] if self.foreseen(one) <= border]
        alone = next(one for one in ranked if not one.workers)
        for settings in dict.fromkeys((*near, alone)):
            if not _alike(settings, self.now):
                yield settings
        yield from self._deeper()

    def _deeper(self) -> Iterator[LoaderSettings]:
        """Yield more prefetching for the best number of workers, if samples are uneven or workers idle."""
        best = self.best.settings
        slow = self.best.seconds > _SLOWER * self.foreseen(best)
        if best.workers and (slow or self.parts.sample_spread > _UNEVEN):
            more = (replace(best, prefetch=one) for one in _PREFETCHES if one > best.prefetch)
            yield from itertools.islice(filter(self._allowed, more), 1)

    def ranked(self) -> list[LoaderSettings]:
        """Return the allowed settings, fastest prediction first."""
        if not self._ranked:
            wholes = (False, True) if self.parts.whole is not None else (False,)
            sizes = itertools.product(range(self.limits.cores + 1), wholes)
            fitting = (self._fitting(workers, whole) for workers, whole in sizes)
            self._ranked = sorted(
                (one for one in fitting if one is not None),
                key=lambda one: (self.foreseen(one), one.workers, one.whole),
            )
        return self._ranked

    def _fitting(self, workers: int, whole: bool) -> LoaderSettings | None:
        """Return settings with this many workers and the prefetching that memory allows, or None."""
        made = LoaderSettings(
            workers=workers, pinned=self.limits.pins, persistent=workers > 0, whole=whole
        )
        for prefetch in (made.prefetch, 1):
            settings = replace(made, prefetch=prefetch)
            if self._fits(settings):
                return settings
        least = memory_bytes(self.parts, replace(made, prefetch=1))
        needed, most = format_apart(least, self.limits.memory or 0)
        self.skipped.append(
            f"{workers} workers: prefetching one batch each needs {needed}, more than the {most} allowed"
        )
        return None

    def _fits(self, settings: LoaderSettings) -> bool:
        most = self.limits.memory
        return most is None or not settings.workers or memory_bytes(self.parts, settings) <= most

    def _allowed(self, settings: LoaderSettings) -> bool:
        return settings.workers <= self.limits.cores and self._fits(settings)

    def foreseen(self, settings: LoaderSettings) -> float:
        """Return the predicted seconds from batch to batch."""
        return batch_seconds(self.parts, settings, self.consumer, self.limits.cores)


def _alike(one: LoaderSettings, other: LoaderSettings) -> bool:
    same = replace(one, persistent=other.persistent)
    return same == other or (not one.workers and same == replace(other, prefetch=one.prefetch))


def window(settings: LoaderSettings) -> tuple[int, int]:
    """Return how many batches a run drops, which were prefetched at its start, and how many it times."""
    timed = max(_WINDOW, 3 * settings.workers)
    return min(settings.ahead + settings.workers, _MOST_BATCHES) or 1, timed
