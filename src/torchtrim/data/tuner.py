"""Finds the settings of a loader by trying few of them."""

from __future__ import annotations

import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader

from torchtrim.core.clock import CLOCK, Clock
from torchtrim.core.units import format_seconds, parse_bytes
from torchtrim.data.here import cores_here, has_device
from torchtrim.data.model import Consumer
from torchtrim.data.parts import BatchSource, parts_of
from torchtrim.data.rebuild import check_loader, end_workers, rebuilt, settings_of, written
from torchtrim.data.search import SearchLimits, SettingsSearch
from torchtrim.errors import UsageError
from torchtrim.records.loader import LoaderSettings, Tuning

_STEPS = 5  # Arbitrary; enough for a mean, few enough for a step of seconds.
Step = Callable[[Any], object]


class Bench(Protocol):
    """Measures a setting."""

    def run(self, settings: LoaderSettings, dropped: int, timed: int) -> list[float]:
        """Seconds of `timed` batches, what is done with them included, after `dropped` others."""


class Tuned(NamedTuple):
    """What `tune` found. `line`: the arguments of the loader that change."""

    tuning: Tuning
    line: str
    loader: DataLoader[Any]

    def __str__(self) -> str:
        before, after = self.tuning.before_seconds, self.tuning.after_seconds
        took = f"{format_seconds(before)} -> {format_seconds(after)} a batch"
        how = (
            "" if self.tuning.source == "measured" else f", modelled for {self.tuning.cores} cores"
        )
        return f"{took}{how}: {self.line}"


def tune(
    loader: DataLoader[Any],
    step: Step | None = None,
    *,
    memory: str | int | None = None,
    seconds: float = 30.0,
    cores: int | None = None,
) -> Tuned:
    """Find how many workers, how many batches ahead and what else suit a loader; the loader stays as it is.

    `step` is called with every batch, as training would: what suits a loader depends on what is done
    meanwhile. It must be one that may be called some dozens of times. Without it the loader alone counts.
    `memory`: bytes that batches read ahead may take (`"2GiB"`). `seconds`: how long it may take. `cores`:
    those of the machine it is for; where they are more than here the result is modelled, and says so. There
    are never more workers than cores. The random generators are afterwards as they were; what the data set
    itself counts is not. Raises `UsageError` for what is no `DataLoader`, or has no batch.
    """
    check_loader(loader)
    _check_limits(seconds, cores)
    most = None if memory is None else parse_bytes(memory)
    with _generators_kept(loader):
        parts = parts_of(BatchSource.of(loader))
        if parts is None:
            raise UsageError(
                "the loader gave no batch when its data set was asked for one here. Try "
                "next(iter(loader)): the error that it raises is in the way."
            )
        consumer = _consumer(loader, step)
        limits = SearchLimits(cores_here(), most, pins=has_device())
        search = SettingsSearch(parts, settings_of(loader), consumer, limits)
        tuning = searched(search, LoaderBench(loader, step), seconds)
    if cores is not None and cores > limits.cores:
        tuning = for_cores(tuning, search, cores)
    return Tuned(tuning, written(tuning.chosen, tuning.before), rebuilt(loader, tuning.chosen))


def searched(search: SettingsSearch, bench: Bench, seconds: float, clock: Clock = CLOCK) -> Tuning:
    """Try what the search asks for, first what the loader has now, until it or the time is at an end."""
    begin = clock.now()
    skipped: list[str] = []
    while (settings := search.ask()) is not None:
        dropped, timed = search.window(settings)
        lasts = search.foreseen(settings) * (dropped + timed)
        if search.tried and clock.now() - begin + lasts > seconds:
            skipped.append(f"{said_of(settings)}: there was no time left to try it")
            continue
        search.tell(bench.run(settings, dropped, timed))
    return tuning_of(search, clock.now() - begin, skipped)


def tuning_of(search: SettingsSearch, took: float, skipped: list[str]) -> Tuning:
    """What a search has found."""
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
    """The settings for more cores than are here, by the model, which is scaled to measurements here."""
    wider = SettingsSearch(
        search.parts,
        search.now,
        search.consumer,
        SearchLimits(cores, search.limits.memory, pins=search.limits.pins),
    )
    best = wider.ranked()[0]
    error = tuning.after_seconds / max(search.foreseen(tuning.chosen), 1e-9)
    return Tuning(
        before=tuning.before,
        chosen=best,
        before_seconds=tuning.before_seconds,
        after_seconds=wider.foreseen(best) * max(error, 1.0),
        cores=cores,
        source="modelled",
        took_seconds=tuning.took_seconds,
        tried=tuning.tried,
        skipped=tuning.skipped,
        path=tuning.path,
        line=tuning.line,
    )


class LoaderBench:
    """Measures with the loader itself, as often rebuilt, and with what is done with its batches."""

    def __init__(self, loader: DataLoader[Any], step: Step | None) -> None:
        self._loader = loader
        self._step = step

    def run(self, settings: LoaderSettings, dropped: int, timed: int) -> list[float]:
        """Seconds from batch to batch. Epochs that end begin again, and count."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            return self._run(rebuilt(self._loader, settings), dropped, timed)

    def _run(self, loader: DataLoader[Any], dropped: int, timed: int) -> list[float]:
        batches = _endless(loader)
        taken: list[float] = []
        try:
            for number in range(dropped + timed):
                begin = time.perf_counter()
                batch = next(batches)
                if self._step is not None:
                    self._step(batch)
                if number >= dropped:
                    taken.append(time.perf_counter() - begin)
        finally:
            batches.close()
            end_workers(loader)
        return taken


def _endless(loader: DataLoader[Any]) -> Any:
    """Batches without end. Raises `UsageError` where an epoch has none."""
    while True:
        some = False
        for batch in loader:
            some = True
            yield batch
        if not some:
            raise UsageError("the loader has no batch: its data set is shorter than one.")


def _consumer(loader: DataLoader[Any], step: Step | None) -> Consumer:
    """What the step takes with its batch there, and how many cores it keeps busy."""
    if step is None:
        return Consumer(0.0, 1.0)
    batch = next(iter(rebuilt(loader, LoaderSettings())))
    step(batch)
    begin, worked = CLOCK.now(), CLOCK.cores()
    for _ in range(_STEPS):
        step(batch)
    took = max(CLOCK.now() - begin, 1e-9)
    return Consumer(took / _STEPS, (CLOCK.cores() - worked) / took)


def _check_limits(seconds: float, cores: int | None) -> None:
    if not seconds > 0:
        raise UsageError(
            f"seconds={seconds}: it takes some time to try settings; give more than 0."
        )
    if cores is not None and cores < 1:
        raise UsageError(f"cores={cores}: a machine has at least one.")


def said_of(settings: LoaderSettings) -> str:
    """Settings in words."""
    return f"{settings.workers} workers, {settings.prefetch} batches ahead of each"


@contextmanager
def _generators_kept(loader: DataLoader[Any]) -> Iterator[None]:
    """Every random generator that a loader draws from is afterwards as it was."""
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
