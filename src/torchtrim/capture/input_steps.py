"""Steps that nobody records: with their loader, and with batches that are already there."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torchtrim.core.clock import CLOCK, Clock
from torchtrim.data.here import cores_here, free_bytes
from torchtrim.data.parts import BatchSource, parts_of
from torchtrim.data.rebuild import settings_of
from torchtrim.records.loader import LoaderCost, LoaderSettings

_LONGEST = 10.0
_LIMIT = 4.0
_WANTED = 4
_LEAST = 2
_PATIENCE = 5.0
Phase = Literal["loading", "ready", "over"]


class StepTime(NamedTuple):
    """One step: its seconds, those in which it waited for batches, and those that cores worked."""

    seconds: float
    waited: float
    busy: float


class Loaders:
    """The loaders that a script made and goes over, and where it made them."""

    def __init__(self, line: Callable[[], tuple[str, int]]) -> None:
        self._line = line
        self._made: WeakKeyDictionary[Any, tuple[str, int]] = WeakKeyDictionary()
        self._of: WeakKeyDictionary[Any, tuple[ref[Any], tuple[str, int]]] = WeakKeyDictionary()

    def appears(self, loader: Any) -> None:
        """A loader was made, by the line that runs now."""
        self._made[loader] = self._line()

    def begins(self, iterator: Any, loader: Any) -> None:
        """A loop over a loader has begun."""
        self._of[iterator] = ref(loader), self._made.get(loader, ("", 0))

    def loader(self, iterator: Any) -> Any:
        """The loader of a loop, None where it is gone or unknown."""
        known = self._of.get(iterator)
        return known[0]() if known is not None else None

    def place(self, iterator: Any) -> tuple[str, int]:
        """Where the loader of a loop was made; `("", 0)` for unknown."""
        known = self._of.get(iterator)
        return known[1] if known is not None else ("", 0)


class InputSteps:
    """Runs a few steps with their loader, then a few that get their last batches again.

    What workers had read ahead while torchtrim was at work is used up first. `seconds` is about what a
    step takes; where it takes longer than ten seconds, none is run. Nothing is frozen that a step did
    not ask for as often before, so a loop that evaluates comes to its end.
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
        """Begin another step; False if there are to be no more."""
        if self.phase == "over":
            return False
        self._runs = True
        self._clean = True
        self._asked.clear()
        self._waited = 0.0
        self._began, self._worked = self._clock.now(), self._clock.cores()
        return True

    def late(self) -> bool:
        """Whether the step takes so long that it can be none."""
        return self._runs and self._clock.now() - self._began > _PATIENCE * (self._seconds + 1.0)

    def spoil(self) -> None:
        """The step that runs is not one like the others."""
        self._clean = False

    def step_ends(self) -> None:
        """The step that runs is complete."""
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
        """Whether this phase has all its steps, or all that there is time for."""
        steps = self.loading if self.phase == "loading" else self.ready
        spent = self._clock.now() - self._phase_began
        enough = len(steps) >= self.settings.ahead + _WANTED
        return enough or (spent > _LIMIT and (len(steps) >= _LEAST or spent > 2 * _LIMIT))

    def _turn(self) -> None:
        self.phase = "ready" if self.phase == "loading" and self.loading else "over"
        self._phase_began = self._clock.now()

    def batch(self, iterator: Any, following: Callable[[Any], Any]) -> Any:
        """The loader's next batch, or in a step that is ready the last one again."""
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
        """The loop over the loader that was waited for most, None before there was one."""
        return self._main

    @property
    def settings(self) -> LoaderSettings:
        """How that loader is set."""
        return settings_of(self._main) if self._main is not None else LoaderSettings()

    def batches(self) -> int:
        """How many batches a step asks for."""
        return max(1, sum(self._usual.values()))


def settled(steps: Sequence[StepTime], ahead: int) -> Sequence[StepTime]:
    """The steps after those that used what was read ahead; the later half where there are too few."""
    return steps[min(ahead, len(steps) // 2) :]


def cost_of(steps: InputSteps, loaders: Loaders, clock: Clock = CLOCK) -> LoaderCost | None:
    """What the loader costs, None where none was seen or there was no step without it."""
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
    """What is known of a loader where no step without it can be timed."""
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
    """The median; with workers, whose batches come in bursts, the mean."""
    return (statistics.fmean if settings.workers else statistics.median)(values)


def _spread(steps: Sequence[StepTime]) -> float:
    seconds = [step.seconds for step in steps]
    return max(seconds) - min(seconds)


def _parts(iterator: Any, clock: Clock) -> Any:
    with _disable_current_modes(), torch.no_grad():
        return parts_of(BatchSource.of(iterator), clock)
