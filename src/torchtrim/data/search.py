"""Which settings of a loader to try, and when to stop: asked for one after the other, told what each took."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from torchtrim.core.units import format_bytes
from torchtrim.data.model import Consumer, batch_seconds, memory_bytes
from torchtrim.records.loader import BatchParts, LoaderSettings, Tried

_PREFETCHES = (1, 2, 4)
_WINDOW = 12  # Arbitrary; a run of a dozen batches has a median that one slow batch does not move.
_MOST_BATCHES = 48  # Arbitrary; where more is ahead the run would throw away most of what it reads.
_CLOSE = 1.3  # Arbitrary; settings that the model foresees to be slower are not tried.
_MOST_TRIED = 3  # Arbitrary; each setting costs seconds.
_DONE = 1.03  # As _BETTER, on the other side.
_BETTER = 0.97  # Arbitrary; less is within the spread of runs, and no gain.
_PROMISING = 0.9  # Arbitrary; a smaller gain is not foreseen surely enough.
_UNEVEN = 0.5  # A deviation of half the mean: a longer queue evens samples out.
_SLOWER = 1.1  # More than a tenth off what was foreseen, workers stand idle.
_EMPTIED = 2.0  # With twice the consumer's time for a batch the queue is empty soon.


class SearchLimits:
    """What a search may use: cores for workers and the consumer, bytes of batches ahead, None for any."""

    def __init__(self, cores: int, memory: int | None = None, *, pins: bool = False) -> None:
        self.cores = max(cores, 1)
        self.memory = memory
        self.pins = pins


class SettingsSearch:
    """Looks for the settings with the shortest time from batch to batch.

    `now` is what the loader has. `ask` gives settings, and of how many batches at the end of a run of how
    many the time is wanted; `tell` takes those times. The model of a batch's parts says what is worth trying:
    what it foresees within a third of the best, at most three settings, and no workers, of which no model of
    processes is wrong; then, where samples differ or it took longer than foreseen, more batches ahead.
    """

    def __init__(
        self, parts: BatchParts, now: LoaderSettings, consumer: Consumer, limits: SearchLimits
    ) -> None:
        self.parts = parts
        self.now = now
        self.consumer = consumer
        self.limits = limits
        self.tried: list[Tried] = []
        self.skipped: list[str] = []
        self._ranked: list[LoaderSettings] = []
        self._left = self._settings()
        self._asked: LoaderSettings | None = None

    def ask(self) -> LoaderSettings | None:
        """The settings to try next, None where no others promise more."""
        if self.tried and self._is_done():
            return None
        self._asked = next(self._left, None)
        return self._asked

    def tell(self, seconds: Sequence[float]) -> None:
        """What the batches took, the first ones of a run without those that were read ahead."""
        assert self._asked is not None
        taken = statistics.fmean(seconds)
        self.tried.append(Tried(settings=self._asked, seconds=taken, batches=len(seconds)))

    def window(self, settings: LoaderSettings) -> tuple[int, int]:
        """How many batches a run of it throws away, and how many it times.

        Where batches take twice as long as what is done with them none are read ahead, beyond the first that
        each worker makes while the others begin.
        """
        dropped, timed = window(settings)
        if self.foreseen(settings) >= _EMPTIED * self.consumer.seconds:
            dropped = min(dropped, settings.workers or 1)
        return dropped, timed

    @property
    def best(self) -> Tried:
        """The quickest that is allowed; of what is as quick as the loader is now, that stays."""
        allowed = [one for one in self.tried if self._allowed(one.settings)] or self.tried
        quickest = min(allowed, key=lambda one: one.seconds)
        kept = self.tried[0]
        same = kept in allowed and quickest.seconds > _BETTER * kept.seconds
        return kept if same else quickest

    def _is_done(self) -> bool:
        """Whether the consumer has all of the time; what it took alone may have been disturbed."""
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
        """More batches ahead of the best number of workers, where samples differ or workers stand idle."""
        best = self.best.settings
        slow = self.best.seconds > _SLOWER * self.foreseen(best)
        if best.workers and (slow or self.parts.sample_spread > _UNEVEN):
            for prefetch in _PREFETCHES:
                settings = replace(best, prefetch=prefetch)
                if prefetch > best.prefetch and self._allowed(settings):
                    yield settings
                    return

    def ranked(self) -> list[LoaderSettings]:
        """The settings that are allowed, those that the model finds quickest first."""
        if self._ranked:
            return self._ranked
        wholes = (False, True) if self.parts.whole is not None else (False,)
        found = [
            settings
            for workers in range(self.limits.cores + 1)
            for whole in wholes
            if (settings := self._fitting(workers, whole)) is not None
        ]
        self._ranked = sorted(found, key=lambda one: (self.foreseen(one), one.workers, one.whole))
        return self._ranked

    def _fitting(self, workers: int, whole: bool) -> LoaderSettings | None:
        """That many workers with as many batches ahead as memory allows; None where one is too many."""
        made = LoaderSettings(
            workers=workers, pinned=self.limits.pins, persistent=workers > 0, whole=whole
        )
        for prefetch in (made.prefetch, 1):
            settings = replace(made, prefetch=prefetch)
            if self._fits(settings):
                return settings
        needed = format_bytes(memory_bytes(self.parts, replace(made, prefetch=1)))
        self.skipped.append(
            f"{workers} workers: one batch ahead of each needs {needed}, more than the "
            f"{format_bytes(self.limits.memory or 0)} that are allowed"
        )
        return None

    def _fits(self, settings: LoaderSettings) -> bool:
        most = self.limits.memory
        return most is None or not settings.workers or memory_bytes(self.parts, settings) <= most

    def _allowed(self, settings: LoaderSettings) -> bool:
        return settings.workers <= self.limits.cores and self._fits(settings)

    def foreseen(self, settings: LoaderSettings) -> float:
        """Seconds from batch to batch that the model foresees."""
        return batch_seconds(self.parts, settings, self.consumer, self.limits.cores)


def _alike(one: LoaderSettings, other: LoaderSettings) -> bool:
    """Whether two settings differ in nothing that counts while batches come."""
    same = replace(one, persistent=other.persistent)
    return same == other or (not one.workers and same == replace(other, prefetch=one.prefetch))


def window(settings: LoaderSettings) -> tuple[int, int]:
    """How many batches a run throws away, which were read ahead while it began, and how many it times."""
    timed = max(_WINDOW, 3 * settings.workers)
    return min(settings.ahead + settings.workers, _MOST_BATCHES) or 1, timed
