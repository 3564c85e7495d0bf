"""What a session learns of its loader: waits of the timed steps, then steps with and without it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from torchtrim.observe.input_steps import InputSteps, Loaders, cost_of, waited_cost
from torchtrim.records.loader import LoaderCost
from torchtrim.records.trial import Trial


class InputPhase:
    """Begins after the last compared step, where the loop has a loader. `line` says who makes a loader."""

    def __init__(self, line: Callable[[], tuple[str, int]]) -> None:
        self.loaders = Loaders(line)
        self._steps: InputSteps | None = None
        self._waits: list[float] = []
        self._waited = 0.0
        self._last: Any = None

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
        return self._steps.batch(iterator, following) if self._steps else following(iterator)

    def next(self, wanted: bool, seconds: float) -> bool:
        """Begin a step with or without its loader; False if there are to be no more."""
        if self._steps is None:
            if not wanted or self._last is None:
                return False
            self._steps = InputSteps(seconds)
        return self._steps.next()

    def late(self) -> bool:
        """Whether the step that runs takes so long that the loop does something else."""
        return self._steps is not None and self._steps.late()

    def idles(self) -> None:
        """The loop evaluates within the step that runs."""
        if self._steps is not None:
            self._steps.spoil()

    def step_ends(self) -> None:
        """The step that runs is complete."""
        if self._steps is not None:
            self._steps.step_ends()

    def cost(self, trial: Trial) -> LoaderCost | None:
        """What the loader costs a step; by the waits alone where nothing could be compared."""
        if self._last is None:
            return None
        compared = cost_of(self._steps, self.loaders) if self._steps is not None else None
        timed = self._waits[trial.request.warmup + 1 :] or self._waits[-1:]
        if compared is not None or not timed:
            return compared
        return waited_cost(self._last, trial.seconds, statistics.median(timed), self.loaders)
