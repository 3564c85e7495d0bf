"""Loader tuning by trying a few settings."""

from __future__ import annotations

import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch.utils.data import DataLoader

from torchtrim.core.clock import CLOCK, Clock
from torchtrim.core.units import format_seconds, parse_bytes
from torchtrim.data.model import Consumer
from torchtrim.data.parts import BatchSource, cores_here, parts_of
from torchtrim.data.rebuild import check_loader, end_workers, rebuilt, settings_of, written
from torchtrim.data.search import SearchLimits, SettingsSearch
from torchtrim.errors import UsageError
from torchtrim.records.loader import LoaderSettings, Tuning

_STEPS = 5  # Arbitrary; enough for a mean, few enough for a step of seconds.
Step = Callable[[Any], object]
Timer = Callable[[LoaderSettings, int, int], list[float]]  # see `seconds_of_batches`


class Tuned(NamedTuple):
    """Result of `tune`. `line`: the loader arguments that change."""

    tuning: Tuning
    line: str
    loader: DataLoader[Any]

    def __str__(self) -> str:
        before, after = self.tuning.before_seconds, self.tuning.after_seconds
        took = f"{format_seconds(before)} -> {format_seconds(after)} a batch"
        modelled = self.tuning.source != "measured"
        how = f", modelled for {self.tuning.cores} cores" if modelled else ""
        return f"{took}{how}: {self.line}"


def tune(
    loader: DataLoader[Any],
    step: Step | None = None,
    *,
    memory: str | int | None = None,
    seconds: float = 30.0,
    cores: int | None = None,
) -> Tuned:
    """Find the number of workers and other settings that suit a loader. The loader itself is unchanged.

    `step` is called with every batch, as in training: the best settings depend on the work done meanwhile. It
    must be safe to call dozens of times. Without it, only the loader is timed. `memory`: bytes that
    prefetched batches may take (`"2GiB"`). `seconds`: time limit. `cores`: cores of the target machine; if it
    has more than this one the result is modelled, and says so. There are never more workers than cores.
    Random generators are restored; counters inside the data set are not. Raises `UsageError` if the loader is
    not a `DataLoader`, or is empty.
    """
    check_loader(loader)
    if not seconds > 0:
        raise UsageError(f"seconds={seconds}: trying settings takes time; give more than 0.")
    if cores is not None and cores < 1:
        raise UsageError(f"cores={cores}: give 1 or more.")
    most = None if memory is None else parse_bytes(memory)
    with _generators_kept(loader):
        parts = parts_of(BatchSource.of(loader))
        if parts is None:
            raise UsageError(
                "could not read a batch from the loader's data set in this process. Run "
                "next(iter(loader)) to see the error."
            )
        consumer = _consumer(loader, step)
        limits = SearchLimits(cores_here(), most, pins=torch.accelerator.is_available())
        search = SettingsSearch(parts, settings_of(loader), consumer, limits)
        tuning = searched(search, partial(seconds_of_batches, loader, step), seconds)
    if cores is not None and cores > limits.cores:
        tuning = for_cores(tuning, search, cores)
    return Tuned(tuning, written(tuning.chosen, tuning.before), rebuilt(loader, tuning.chosen))


def searched(search: SettingsSearch, timer: Timer, seconds: float, clock: Clock = CLOCK) -> Tuning:
    """Try the settings that the search proposes, current ones first, until all are tried or time is up."""
    begin = clock.now()
    skipped: list[str] = []
    while (settings := search.ask()) is not None:
        dropped, timed = search.window(settings)
        lasts = search.foreseen(settings) * (dropped + timed)
        if search.tried and clock.now() - begin + lasts > seconds:
            skipped.append(f"{said_of(settings)}: not tried: out of time")
            continue
        search.tell(timer(settings, dropped, timed))
    return tuning_of(search, clock.now() - begin, skipped)


def tuning_of(search: SettingsSearch, took: float, skipped: list[str]) -> Tuning:
    """Return the outcome of a search."""
    best = search.best
    return Tuning(
        before=search.now,
        chosen=best.settings,
        before_seconds=search.tried[0].seconds,
        after_seconds=best.seconds,
        cores=search.limits.cores,
        took_seconds=took,
        tried=tuple(search.tried),
        skipped=(*search.skipped, *skipped),
    )


def for_cores(tuning: Tuning, search: SettingsSearch, cores: int) -> Tuning:
    """Return settings for more cores than this machine has, from the model scaled to the measurements."""
    limits = search.limits._replace(cores=cores)
    wider = SettingsSearch(search.parts, search.now, search.consumer, limits)
    best = wider.ranked()[0]
    error = max(tuning.after_seconds / max(search.foreseen(tuning.chosen), 1e-9), 1.0)
    after = wider.foreseen(best) * error
    return replace(tuning, chosen=best, after_seconds=after, cores=cores, source="modelled")


def seconds_of_batches(
    loader: DataLoader[Any], step: Step | None, settings: LoaderSettings, dropped: int, timed: int
) -> list[float]:
    """Return the seconds of `timed` batches, `step` included, after `dropped` others.

    The loader is rebuilt with the settings. A new epoch starts when one ends, and counts.
    """
    taken: list[float] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        loader = rebuilt(loader, settings)
        batches = _endless(loader)
        try:
            for number in range(dropped + timed):
                begin = time.perf_counter()
                batch = next(batches)
                if step is not None:
                    step(batch)
                if number >= dropped:
                    taken.append(time.perf_counter() - begin)
        finally:
            batches.close()
            end_workers(loader)
    return taken


def _endless(loader: DataLoader[Any]) -> Any:
    while True:
        some = False
        for batch in loader:
            some = True
            yield batch
        if not some:
            raise UsageError("the loader is empty: its data set is shorter than one batch.")


def _consumer(loader: DataLoader[Any], step: Step | None) -> Consumer:
    """Time the step on a batch that is already loaded, and count the cores it keeps busy."""
    if step is None:
        return Consumer(0.0, 1.0)
    batch = next(iter(rebuilt(loader, LoaderSettings())))
    step(batch)
    begin, worked = CLOCK.now(), CLOCK.cores()
    for _ in range(_STEPS):
        step(batch)
    took = max(CLOCK.now() - begin, 1e-9)
    return Consumer(took / _STEPS, (CLOCK.cores() - worked) / took)


def said_of(settings: LoaderSettings) -> str:
    """Describe settings in words."""
    return f"{settings.workers} workers, {settings.prefetch} batches ahead of each"


@contextmanager
def _generators_kept(loader: DataLoader[Any]) -> Iterator[None]:
    """Restore every random generator that the loader may draw from."""
    numpy: Any = sys.modules.get("numpy")
    own = loader.generator.get_state() if loader.generator is not None else None
    former = random.getstate(), torch.get_rng_state(), numpy and numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(former[0])
        torch.set_rng_state(former[1])
        if numpy:
            numpy.random.set_state(former[2])
        if own is not None:
            loader.generator.set_state(own)
