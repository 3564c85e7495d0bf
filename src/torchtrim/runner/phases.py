"""Phases of a session after its compared steps: steps with and without the loader, and growth."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from msgspec.structs import replace
from torch.utils.data import DataLoader

from torchtrim.capture.input_steps import InputSteps, Loaders, cost_of, waited_cost
from torchtrim.capture.watch import Listener
from torchtrim.data.model import Consumer
from torchtrim.data.parts import cores_here
from torchtrim.data.rebuild import end_workers, rebuilt
from torchtrim.data.search import SearchLimits, SettingsSearch
from torchtrim.data.tuner import for_cores, said_of, tuning_of
from torchtrim.dispatch.places import Places
from torchtrim.records.loader import LoaderCost, LoaderSettings, Tuning
from torchtrim.records.trial import Trial, TuningRequest

Aside = Callable[[], AbstractContextManager[None]]


_PATIENCE = 5.0  # arbitrary, above the spread of steps and below a loop that evaluates


class InputPhase(Listener):
    """Phase that runs steps with and without the loader, then, on request, with other loader settings.

    `places` finds the line that creates a loader. `aside` pauses watching, for modules of a data set.
    """

    def __init__(self, places: Places, aside: Aside) -> None:
        self.loaders = Loaders(lambda: places.users_line(sys._getframe(5))[:2])
        self._aside = aside
        self._steps: InputSteps | None = None
        self._tried: _TriedLoaders | None = None
        self._cost: LoaderCost | None = None
        self._waits: list[float] = []
        self._waited = 0.0
        self._last: Any = None

    @property
    def _running(self) -> InputSteps | _TriedLoaders | None:
        return self._tried or self._steps

    @property
    def runs(self) -> bool:
        return self._steps is not None

    def loader_appears(self, loader: DataLoader[Any]) -> None:
        self.loaders.appears(loader)

    def loader_begins(self, iterator: Any, loader: DataLoader[Any]) -> None:
        self.loaders.begins(iterator, loader)

    def loader_waited(self, start_ns: int, end_ns: int, workers: int) -> None:
        self._waited += (end_ns - start_ns) / 1e9

    def compared_step_ends(self) -> None:
        self._waits.append(self._waited)
        self._waited = 0.0

    def batch(self, iterator: Any, following: Callable[[Any], Any]) -> Any:
        self._last = iterator
        running = self._running
        return running.batch(iterator, following) if running else following(iterator)

    def next(self, wanted: bool, trial: Trial) -> bool:
        if self._steps is None:
            if not wanted or self._last is None:
                return False
            self._steps = InputSteps(trial.seconds)
        if self._tried is None and self._steps.next():
            return True
        return self._tries(trial) and self._tried is not None and self._tried.next()

    def _tries(self, trial: Trial) -> bool:
        tunes = trial.request.tunes
        if self._tried is None and tunes is not None and self._steps is not None:
            cost = self._costs(trial)
            main = self._steps.main
            loader = self.loaders.loader(main)
            if cost is not None and cost.parts is not None and loader is not None:
                pins = trial.device.startswith("cuda")
                self._tried = _TriedLoaders(cost, loader, main, tunes, pins=pins)
        return self._tried is not None

    def late(self) -> bool:
        """Return True if the current step takes so long that the loop must be doing something else."""
        return self._running is not None and self._running.late()

    def idles(self) -> None:
        """Discard the current step, since the loop evaluates within it."""
        if self._running is not None:
            self._running.spoil()

    def step_ends(self) -> None:
        if self._running is not None:
            self._running.step_ends()

    def end(self, trial: Trial) -> None:
        if trial.request.times or trial.request.tunes:
            trial.loader = self._costs(trial)
        if self._tried is not None:
            self._tried.end()
            trial.tuning = self._tried.tuning()

    def _costs(self, trial: Trial) -> LoaderCost | None:
        """Return the loader's cost of a step, from the waits alone if no steps could be compared."""
        if self._cost is None and self._last is not None:
            with self._aside():
                compared = cost_of(self._steps, self.loaders) if self._steps is not None else None
                self._cost = compared or self._by_waits(trial)
        return self._cost

    def _by_waits(self, trial: Trial) -> LoaderCost | None:
        timed = self._waits[trial.request.warmup + 1 :] or self._waits[-1:]
        if not timed:
            return None
        waited = statistics.median(timed)
        return waited_cost(self._last, trial.seconds, waited, self.loaders)


class _TriedLoaders:
    """Trials of the loader settings of a search, each in some steps of the script itself.

    `iterator`: the script's loop over the loader; `cost`: the loader's cost; `pins`: batches go to a GPU.
    """

    def __init__(
        self, cost: LoaderCost, loader: Any, iterator: Any, tunes: TuningRequest, *, pins: bool
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
        self._start = self._began = time.perf_counter()
        self._settings: LoaderSettings | None = None
        self._made: Any = None
        self._batches: Any = None
        self._taken: list[float] = []
        self._seen = 0
        self._clean = True
        self._skipped: list[str] = []

    def next(self) -> bool:
        if self._settings is None and not self._begin():
            return False
        self._clean = True
        self._began = time.perf_counter()
        return True

    def late(self) -> bool:
        usual = self._cost.step_seconds + 1.0
        return time.perf_counter() - self._began > _PATIENCE * usual

    def spoil(self) -> None:
        self._clean = False

    def step_ends(self) -> None:
        if self._settings is None:
            return
        took = time.perf_counter() - self._began
        dropped, timed = self._search.window(self._settings)
        self._seen += self._cost.batches
        if self._clean and self._seen > dropped:
            self._taken.append(took / self._cost.batches)
        if len(self._taken) * self._cost.batches >= timed:
            self._search.tell(self._taken)
            self.end()

    def batch(self, iterator: Any, following: Callable[[Any], Any]) -> Any:
        """Return a batch of the tried loader, or of the script's other loaders."""
        if self._made is None or iterator._dataset is not self._dataset:
            return following(iterator)
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self._made)
            return next(self._batches)

    def end(self) -> None:
        if self._made is not None:
            workers = getattr(self._batches, "_shutdown_workers", None)
            if workers is not None:
                workers()
            end_workers(self._made)
        self._settings = self._made = self._batches = None

    def _begin(self) -> bool:
        """Create the loader with the next settings worth a try, if there is time for it."""
        while (settings := self._search.ask()) is not None:
            dropped, timed = self._search.window(settings)
            lasts = self._search.foreseen(settings) * (dropped + timed)
            spent = time.perf_counter() - self._start
            if self._search.tried and spent + lasts > self._tunes.seconds:
                self._skipped.append(f"{said_of(settings)}: not tried: out of time")
                continue
            self._settings, self._taken, self._seen = settings, [], 0
            self._made = rebuilt(self._loader, settings)
            self._batches = iter(self._made)
            return True
        return False

    def tuning(self) -> Tuning | None:
        if not self._search.tried:
            return None
        tuning = tuning_of(self._search, time.perf_counter() - self._start, self._skipped)
        cores = self._tunes.cores
        if cores is not None and cores > self._search.limits.cores:
            tuning = for_cores(tuning, self._search, cores)
        return replace(tuning, path=self._cost.path, line=self._cost.line)
