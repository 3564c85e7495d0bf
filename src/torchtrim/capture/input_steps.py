"""Times unrecorded steps, with their loader and with batches that are already loaded."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from msgspec.structs import replace
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
"""Steps. Arbitrary: enough for a median and a spread."""
_LEAST = 2
"""The fewest steps with a spread."""
_PATIENCE = 5.0
"""Arbitrary: a step that takes this many times as long as usual is not a training step."""


class StepTime(NamedTuple):
    """A step's seconds, its seconds waiting for batches, and its CPU seconds."""

    seconds: float
    waited: float
    busy: float


_NO_LOADER: tuple[Callable[[], Any], tuple[str, int]] = (lambda: None, ("", 0))


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
        """Return the loader of a loop, or None if it is unknown or no longer exists."""
        return self._of.get(iterator, _NO_LOADER)[0]()

    def place(self, iterator: Any) -> tuple[str, int]:
        """Return where the loader of a loop was created, `("", 0)` if unknown."""
        return self._of.get(iterator, _NO_LOADER)[1]


class InputSteps:
    """A timer of a few steps with their loader, then of a few that reuse their last batches.

    Batches that workers prefetched while torchtrim was busy are used up first. `seconds` is the approximate
    time of a step; if it is over ten seconds, no step is timed. A loader is reused only as often as earlier
    steps used it, so a loop that evaluates still ends. `main` is the loop over the loader with the longest
    waits, or None.
    """

    def __init__(self, seconds: float, clock: Clock = CLOCK) -> None:
        self.loading: list[StepTime] = []
        self.ready: list[StepTime] = []
        self.phase: Literal["loading", "ready", "over"] = (
            "loading" if seconds <= _LONGEST else "over"
        )
        self._seconds = seconds
        self._clock = clock
        self._kept: dict[int, Any] = {}
        self._usual: Counter[int] = Counter()
        self._asked: Counter[int] = Counter()
        self._held: dict[int, Any] = {}
        self._waits: dict[int, float] = {}
        self.main: Any = None
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
        if self.phase == "loading" and not self._asked and not self._usual:
            self.phase = "over"
            return
        if self.phase != "over" and self._clean:
            (self.loading if self.phase == "loading" else self.ready).append(step)
        if self.phase == "loading":
            self._usual |= self._asked
        steps = self.loading if self.phase == "loading" else self.ready
        spent = self._clock.now() - self._phase_began
        is_slow = spent > _LIMIT and (len(steps) >= _LEAST or spent > 2 * _LIMIT)
        if is_slow or len(steps) >= self.settings.ahead + _WANTED:
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
        if self.main is None or self._waits[key] >= self._waits[id(self.main._dataset)]:
            self.main = iterator
        return batch

    @property
    def settings(self) -> LoaderSettings:
        """The settings of the main loop's loader."""
        return settings_of(self.main) if self.main is not None else LoaderSettings()

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
    seconds = [[step.seconds for step in some] for some in (loading, ready)]
    ready_seconds = statistics.median(seconds[1])
    # Batches from workers arrive in bursts, which a median would hide.
    typical = statistics.fmean if settings.workers else statistics.median
    waited = typical([step.waited for step in loading])
    return replace(
        waited_cost(steps.main, typical(seconds[0]), waited, loaders, clock),
        ready_seconds=ready_seconds,
        spread_seconds=max(max(some) - min(some) for some in seconds),
        busy=statistics.median(step.busy for step in ready) / max(ready_seconds, 1e-9),
        batches=steps.batches(),
    )


def waited_cost(
    iterator: Any, step_seconds: float, waited: float, loaders: Loaders, clock: Clock = CLOCK
) -> LoaderCost:
    """Return the cost of a loader if no step without it can be timed."""
    path, line = loaders.place(iterator)
    with _disable_current_modes(), torch.no_grad():
        parts = parts_of(BatchSource.of(iterator), clock)
    return LoaderCost(
        step_seconds=step_seconds,
        ready_seconds=None,
        waited_seconds=waited,
        cores=cores_here(),
        settings=settings_of(iterator),
        parts=parts,
        free_bytes=free_bytes(),
        path=path,
        line=line,
    )
