"""Times unrecorded steps, with their loader and with batches that are already loaded."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torchtrim.core.clock import CLOCK, Clock
from torchtrim.data.parts import BatchSource, cores_here, free_bytes, parts_of
from torchtrim.data.rebuild import settings_of
from torchtrim.records.loader import LoaderCost, LoaderSettings

_LONGEST = 10.0
"""Seconds. Arbitrary: slower steps would add minutes to a run."""
_LIMIT = 4.0
"""Seconds for each phase. Arbitrary: short beside the run that was recorded."""
_WANTED = 4
"""Steps that give a median and a spread."""
_LEAST = 2
"""The fewest steps with a spread."""
_PATIENCE = 5.0
"""Arbitrary: a step that takes this many times as long as usual is not a training step."""

Phase = Literal["loading", "ready", "over"]


class StepTime(NamedTuple):
    """A step's seconds, its seconds waiting for batches, and its CPU seconds."""

    seconds: float
    waited: float
    busy: float


class Loaders:
    """The script's loaders, their loops, and where they were created."""

    def __init__(self, line: Callable[[], tuple[str, int]]) -> None:
        self._line = line
        self._made: WeakKeyDictionary[Any, tuple[str, int]] = WeakKeyDictionary()
        self._of: WeakKeyDictionary[Any, tuple[ref[Any], tuple[str, int]]] = WeakKeyDictionary()

    def appears(self, loader: Any) -> None:
        """Record a loader created by the running line."""
        self._made[loader] = self._line()

    def begins(self, iterator: Any, loader: Any) -> None:
        """Record the start of a loop over a loader."""
        self._of[iterator] = ref(loader), self._made.get(loader, ("", 0))

    def loader(self, iterator: Any) -> Any:
        """Return the loader of a loop, or None if it is gone or unknown."""
        known = self._of.get(iterator)
        return known[0]() if known is not None else None

    def place(self, iterator: Any) -> tuple[str, int]:
        """Return where the loader of a loop was created, `("", 0)` if unknown."""
        known = self._of.get(iterator)
        return known[1] if known is not None else ("", 0)


class InputSteps:
    """Timer of a few steps with their loader, then of a few that reuse their last batches.

    Batches that workers prefetched while torchtrim was busy are used up first. `seconds` is the approximate
    time of a step; if that is over ten seconds, no step is timed. A loader is reused only as often as earlier
    steps used it, so a loop that evaluates still ends.
    """

    def __init__(self, seconds: float, clock: Clock = CLOCK) -> None:
        self.loading: list[StepTime] = []
        self.ready: list[StepTime] = []
        self.phase: Phase = "loading" if seconds <= _LONGEST else "over"
        self._seconds = seconds
        self._clock = clock
        self._kept: dict[int, Any] = {}
        self._usual: Counter[int] = Counter()
        self._asked: Counter[int] = Counter()
        self._held: dict[int, Any] = {}
        self._waits: dict[int, float] = {}
        self._main: Any = None
        self._waited = self._began = self._worked = 0.0
        self._phase_began = clock.now()
        self._clean = True
        self._runs = False

    def next(self) -> bool:
        """Begin another step; return False if no more are needed."""
        if self.phase == "over":
            return False
        self._runs = True
        self._clean = True
        self._asked.clear()
        self._waited = 0.0
        self._began, self._worked = self._clock.now(), self._clock.cores()
        return True

    def late(self) -> bool:
        """Return True if the step takes so long that it cannot be one."""
        return self._runs and self._clock.now() - self._began > _PATIENCE * (self._seconds + 1.0)

    def spoil(self) -> None:
        """Exclude the running step from the timings."""
        self._clean = False

    def step_ends(self) -> None:
        """End the running step."""
        took = self._clock.now() - self._began
        step = StepTime(took, self._waited, self._clock.cores() - self._worked)
        if self.phase == "loading":
            self._loaded(step)
        elif self.phase == "ready" and self._clean:
            self.ready.append(step)
        if self._is_over():
            self._turn()

    def _loaded(self, step: StepTime) -> None:
        if not self._asked and not self._usual:
            self.phase = "over"
            return
        if self._clean:
            self.loading.append(step)
        for key, count in self._asked.items():
            self._usual[key] = max(self._usual[key], count)

    def _is_over(self) -> bool:
        """Return True if this phase has enough steps, or has run out of time."""
        steps = self.loading if self.phase == "loading" else self.ready
        spent = self._clock.now() - self._phase_began
        enough = len(steps) >= self.settings.ahead + _WANTED
        return enough or (spent > _LIMIT and (len(steps) >= _LEAST or spent > 2 * _LIMIT))

    def _turn(self) -> None:
        self.phase = "ready" if self.phase == "loading" and self.loading else "over"
        self._phase_began = self._clock.now()

    def batch(self, iterator: Any, following: Callable[[Any], Any]) -> Any:
        """Return the loader's next batch, or the last one again in the `ready` phase."""
        key = id(iterator._dataset)
        if self.phase == "ready" and key in self._kept and self._asked[key] < self._usual[key]:
            self._asked[key] += 1
            return self._kept[key]
        if self.phase == "ready":
            self.spoil()
        begin = self._clock.now()
        try:
            batch = following(iterator)
        except StopIteration:
            self.spoil()
            raise
        waited = self._clock.now() - begin
        self._asked[key] += 1
        self._kept[key], self._held[key] = batch, iterator._dataset
        self._waited += waited
        self._waits[key] = self._waits.get(key, 0.0) + waited
        if self._main is None or self._waits[key] >= self._waits[id(self._main._dataset)]:
            self._main = iterator
        return batch

    @property
    def main(self) -> Any:
        """The loop over the loader with the longest waits, or None."""
        return self._main

    @property
    def settings(self) -> LoaderSettings:
        """That loader's settings."""
        return settings_of(self._main) if self._main is not None else LoaderSettings()

    def batches(self) -> int:
        """Return the number of batches in a step."""
        return max(1, sum(self._usual.values()))


def settled(steps: Sequence[StepTime], ahead: int) -> Sequence[StepTime]:
    """Return the steps after those that used prefetched batches, or the later half if there are too few."""
    return steps[min(ahead, len(steps) // 2) :]


def cost_of(steps: InputSteps, loaders: Loaders, clock: Clock = CLOCK) -> LoaderCost | None:
    """Return the loader's cost, or None without a loader or a step timed without it."""
    if steps.main is None or not steps.loading or not steps.ready:
        return None
    settings = steps.settings
    loading = settled(steps.loading, settings.ahead)
    ready = settled(steps.ready, settings.ahead)
    ready_seconds = statistics.median(step.seconds for step in ready)
    path, line = loaders.place(steps.main)
    return LoaderCost(
        step_seconds=_typical([step.seconds for step in loading], settings),
        ready_seconds=ready_seconds,
        waited_seconds=_typical([step.waited for step in loading], settings),
        spread_seconds=max(map(_spread, (loading, ready))),
        busy=statistics.median(step.busy for step in ready) / max(ready_seconds, 1e-9),
        batches=steps.batches(),
        cores=cores_here(),
        settings=settings,
        parts=_parts(steps.main, clock),
        free_bytes=free_bytes(),
        path=path,
        line=line,
    )


def waited_cost(iterator: Any, step_seconds: float, waited: float, loaders: Loaders) -> LoaderCost:
    """Return the cost of a loader if no step without it can be timed."""
    path, line = loaders.place(iterator)
    return LoaderCost(
        step_seconds=step_seconds,
        ready_seconds=None,
        waited_seconds=waited,
        cores=cores_here(),
        settings=settings_of(iterator),
        parts=_parts(iterator, CLOCK),
        free_bytes=free_bytes(),
        path=path,
        line=line,
    )


def _typical(values: Sequence[float], settings: LoaderSettings) -> float:
    """Return the median, or the mean with workers, whose batches arrive in bursts."""
    return (statistics.fmean if settings.workers else statistics.median)(values)


def _spread(steps: Sequence[StepTime]) -> float:
    seconds = [step.seconds for step in steps]
    return max(seconds) - min(seconds)


def _parts(iterator: Any, clock: Clock) -> Any:
    with _disable_current_modes(), torch.no_grad():
        return parts_of(BatchSource.of(iterator), clock)
