"""Has the steps of a running script get their batches from the same loader, set otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from torchtrim.core.clock import CLOCK, Clock
from torchtrim.data.here import cores_here
from torchtrim.data.model import Consumer
from torchtrim.data.rebuild import end_workers, rebuilt
from torchtrim.data.search import SearchLimits, SettingsSearch
from torchtrim.data.tuner import for_cores, said_of, tuning_of
from torchtrim.records.loader import LoaderCost, LoaderSettings, Tuning
from torchtrim.records.trial import Tunes

_PATIENCE = 5.0


class TriedLoaders:
    """Tries what a search asks for, each setting in some steps of the script itself.

    `iterator` is the script's loop over the loader, of which `cost` says what it costs. `pins`: the batches
    go to a device.
    """

    def __init__(
        self,
        cost: LoaderCost,
        loader: Any,
        iterator: Any,
        tunes: Tunes,
        *,
        pins: bool = False,
        clock: Clock = CLOCK,
    ) -> None:
        assert cost.parts is not None
        ready = cost.step_seconds if cost.ready_seconds is None else cost.ready_seconds
        consumer = Consumer(ready / max(cost.batches, 1), cost.busy)
        limits = SearchLimits(cores_here(), tunes.memory, pins=pins)
        self._search = SettingsSearch(cost.parts, cost.settings, consumer, limits)
        self._cost = cost
        self._loader = loader
        self._dataset = iterator._dataset
        self._tunes = tunes
        self._clock = clock
        self._start = self._began = clock.now()
        self._settings: LoaderSettings | None = None
        self._made: Any = None
        self._batches: Any = None
        self._taken: list[float] = []
        self._seen = 0
        self._clean = True
        self._skipped: list[str] = []

    def next(self) -> bool:
        """Begin another step; False if there are to be no more."""
        if self._settings is None and not self._begin():
            return False
        self._clean = True
        self._began = self._clock.now()
        return True

    def late(self) -> bool:
        """Whether the step takes so long that the loop does something else."""
        usual = self._cost.step_seconds + 1.0
        return self._clock.now() - self._began > _PATIENCE * usual

    def spoil(self) -> None:
        """The step that runs is not one like the others."""
        self._clean = False

    def step_ends(self) -> None:
        """The step that runs is complete."""
        if self._settings is None:
            return
        took = self._clock.now() - self._began
        dropped, timed = self._search.window(self._settings)
        self._seen += self._cost.batches
        if self._clean and self._seen > dropped:
            self._taken.append(took / self._cost.batches)
        if len(self._taken) * self._cost.batches >= timed:
            self._search.tell(self._taken)
            self.end()

    def batch(self, iterator: Any, following: Callable[[Any], Any]) -> Any:
        """A batch of the loader that is tried; the script's own from its other loaders."""
        if self._made is None or iterator._dataset is not self._dataset:
            return following(iterator)
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self._made)
            return next(self._batches)

    def end(self) -> None:
        """End the workers of the loader that is tried."""
        if self._made is not None:
            workers = getattr(self._batches, "_shutdown_workers", None)
            if workers is not None:
                workers()
            end_workers(self._made)
        self._settings = self._made = self._batches = None

    def _begin(self) -> bool:
        """Make the next loader that is worth a try, if there is one and the time for it."""
        while (settings := self._search.ask()) is not None:
            dropped, timed = self._search.window(settings)
            lasts = self._search.foreseen(settings) * (dropped + timed)
            spent = self._clock.now() - self._start
            if self._search.tried and spent + lasts > self._tunes.seconds:
                self._skipped.append(f"{said_of(settings)}: there was no time left to try it")
                continue
            self._settings, self._taken, self._seen = settings, [], 0
            self._made = rebuilt(self._loader, settings)
            self._batches = iter(self._made)
            return True
        return False

    def tuning(self) -> Tuning | None:
        """What was found, None where nothing was tried to its end."""
        if not self._search.tried:
            return None
        found = tuning_of(self._search, self._clock.now() - self._start, self._skipped)
        cores = self._tunes.cores
        if cores is not None and cores > self._search.limits.cores:
            found = for_cores(found, self._search, cores)
        return replace(found, path=self._cost.path, line=self._cost.line)
