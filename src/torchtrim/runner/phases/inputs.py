"""What a session learns of its loader: waits of the timed steps, then steps with and without it."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torchtrim.capture.input_steps import InputSteps, Loaders, cost_of, waited_cost
from torchtrim.dispatch.places import Places
from torchtrim.records.loader import LoaderCost
from torchtrim.records.trial import Trial
from torchtrim.runner.phases.loaders import TriedLoaders

Aside = Callable[[], AbstractContextManager[None]]


class InputPhase:
    """Begins after the last compared step, where the loop has a loader. `places` say who makes a loader.

    `aside`: nothing is watched in it, such as modules with which a data set changes the samples that it is
    asked for.

    At first steps are run with the loader and without it; then, where that is asked for, the loader is
    tried with other settings.
    """

    def __init__(self, places: Places, aside: Aside) -> None:
        self.loaders = Loaders(lambda: places.users_line(sys._getframe(3))[:2])
        self._aside = aside
        self._steps: InputSteps | None = None
        self._tried: TriedLoaders | None = None
        self._cost: LoaderCost | None = None
        self._waits: list[float] = []
        self._waited = 0.0
        self._last: Any = None

    @property
    def _running(self) -> InputSteps | TriedLoaders | None:
        return self._tried or self._steps

    @property
    def runs(self) -> bool:
        """Whether steps are run for it."""
        return self._steps is not None

    def waited(self, seconds: float) -> None:
        """The loop waited for a batch."""
        self._waited += seconds

    def step_is_timed(self) -> None:
        """One of the compared steps is complete."""
        self._waits.append(self._waited)
        self._waited = 0.0

    def batch(self, iterator: Any, following: Callable[[Any], Any]) -> Any:
        """What the loop gets."""
        self._last = iterator
        running = self._running
        return running.batch(iterator, following) if running else following(iterator)

    def next(self, wanted: bool, trial: Trial) -> bool:
        """Begin a step with or without its loader; False if there are to be no more."""
        if self._steps is None:
            if not wanted or self._last is None:
                return False
            self._steps = InputSteps(trial.seconds)
        if self._tried is None and self._steps.next():
            return True
        return self._tries(trial) and self._tried is not None and self._tried.next()

    def _tries(self, trial: Trial) -> bool:
        """Whether there is a loader to try with other settings."""
        if self._tried is None and trial.request.tunes is not None and self._steps is not None:
            cost = self._costs(trial)
            loader = self.loaders.loader(self._steps.main)
            if cost is not None and cost.parts is not None and loader is not None:
                self._tried = TriedLoaders(
                    cost,
                    loader,
                    self._steps.main,
                    trial.request.tunes,
                    pins=trial.device.startswith("cuda"),
                )
        return self._tried is not None

    def late(self) -> bool:
        """Whether the step that runs takes so long that the loop does something else."""
        return self._running is not None and self._running.late()

    def idles(self) -> None:
        """The loop evaluates within the step that runs."""
        if self._running is not None:
            self._running.spoil()

    def step_ends(self) -> None:
        """The step that runs is complete."""
        if self._running is not None:
            self._running.step_ends()

    def end(self, trial: Trial) -> None:
        """Stop, and note what was learnt."""
        if trial.request.times or trial.request.tunes:
            trial.loader = self._costs(trial)
        if self._tried is not None:
            self._tried.end()
            trial.tuning = self._tried.tuning()

    def _costs(self, trial: Trial) -> LoaderCost | None:
        """What the loader costs a step; by the waits alone where nothing could be compared."""
        if self._cost is None and self._last is not None:
            with self._aside():
                self._cost = self._compared() or self._by_waits(trial)
        return self._cost

    def _compared(self) -> LoaderCost | None:
        return cost_of(self._steps, self.loaders) if self._steps is not None else None

    def _by_waits(self, trial: Trial) -> LoaderCost | None:
        timed = self._waits[trial.request.warmup + 1 :] or self._waits[-1:]
        if not timed:
            return None
        waited = statistics.median(timed)
        return waited_cost(self._last, trial.seconds, waited, self.loaders)
