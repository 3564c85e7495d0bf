"""The tuner's search against grids that are counted, not timed."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from msgspec.structs import replace

import draws
from data.machine import Machine, parts
from torchtrim.core.clock import Clock
from torchtrim.data.model import Consumer, memory_bytes
from torchtrim.data.search import SearchLimits, SettingsSearch, window
from torchtrim.data.tuner import for_cores, searched
from torchtrim.records.loader import BatchParts, LoaderSettings, Tuning

NOTHING = LoaderSettings()


def tuned(
    batch: BatchParts, consumer: Consumer, limits: SearchLimits, now: LoaderSettings = NOTHING
) -> tuple[Tuning, Machine]:
    machine = Machine(batch, consumer, limits.cores)
    clock = Clock(lambda: machine.seconds, lambda: 0.0, lambda: 0.0)
    search = SettingsSearch(batch, now, consumer, limits)
    return searched(search, machine.run, 1e9, clock), machine


def grid(batch: BatchParts, consumer: Consumer, limits: SearchLimits) -> tuple[float, float]:
    """The shortest time from batch to batch of all settings, and how long it takes to try them all."""
    machine = Machine(batch, consumer, limits.cores)
    found = []
    for workers, prefetch in itertools.product(range(limits.cores + 1), (1, 2, 4)):
        settings = LoaderSettings(workers=workers, prefetch=prefetch, persistent=workers > 0)
        machine.run(settings, settings.ahead + 1, 64)
        found.append(machine.rate(settings))
    return min(found), machine.seconds


CASES = {
    "slow read": (parts(reading=0.08, decoding=0.002), Consumer(0.02)),
    "slow read, quick step": (parts(reading=0.08), Consumer(0.001)),
    "slow decode": (parts(decoding=0.06, reading=0.001), Consumer(0.03)),
    "slow collate": (parts(collating=0.05, decoding=0.001), Consumer(0.02)),
    "all alike": (parts(0.02, 0.02, 0.02), Consumer(0.02)),
    "next to nothing": (parts(decoding=0.0002), Consumer(0.05)),
    "huge samples": (parts(decoding=0.01, handing=0.05), Consumer(0.01)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cores", [1, 2, 4, 8])
def test_it_finds_what_a_grid_finds_in_a_tenth_of_the_time(name: str, cores: int) -> None:
    batch, consumer = CASES[name]
    limits = SearchLimits(cores)
    best, whole_time = grid(batch, consumer, limits)
    found, machine = tuned(batch, consumer, limits)
    assert machine.rate(found.chosen) <= best / 0.95
    if cores >= 4:
        assert machine.seconds <= 0.1 * whole_time
    assert found.chosen.workers <= cores


@pytest.mark.parametrize("seed", draws.some(range(48)))
def test_it_finds_what_a_grid_finds_on_any_loader(seed: int) -> None:
    random = Random(seed)
    sizes = [random.choice((0.001, 0.005, 0.02, 0.06)) for _ in range(4)]
    batch, consumer = parts(*sizes[:3]), Consumer(sizes[3], random.choice((1.0, 2.0)))
    limits = SearchLimits(random.choice((1, 2, 4)))
    best, _ = grid(batch, consumer, limits)
    found, machine = tuned(batch, consumer, limits)
    assert machine.rate(found.chosen) <= best / 0.95


def test_eight_workers_on_two_cores_are_never_chosen() -> None:
    now = LoaderSettings(workers=8)
    found, _ = tuned(parts(reading=0.5, decoding=0.001), Consumer(0.01), SearchLimits(2), now)
    assert found.before.workers == 8
    assert found.chosen.workers == 2
    assert found.before_seconds < found.after_seconds


def test_where_nothing_is_read_ahead_little_is_thrown_away() -> None:
    settings = LoaderSettings(workers=4)
    search = SettingsSearch(parts(decoding=0.04), settings, Consumer(0.009), SearchLimits(2))
    assert search.window(settings) == (4, 12)
    machine = Machine(search.parts, search.consumer, 2)
    assert sum(machine.run(settings, 4, 12)) / 12 == pytest.approx(machine.rate(settings), rel=0.1)
    slower = SettingsSearch(parts(decoding=0.04), settings, Consumer(0.02), SearchLimits(2))
    assert slower.window(settings) == window(settings) == (12, 12)


def test_memory_sets_how_much_is_ahead() -> None:
    batch = replace(parts(reading=0.08, decoding=0.01), bytes=100 << 20)
    for most in (250 << 20, 350 << 20, 550 << 20, 2 << 30):
        found, _ = tuned(batch, Consumer(0.01), SearchLimits(4, most))
        assert all(
            memory_bytes(batch, one.settings) <= most for one in found.tried if one.settings.workers
        )
        assert bool(found.skipped) == (most < memory_bytes(batch, LoaderSettings(workers=4)))
    none, _ = tuned(batch, Consumer(0.01), SearchLimits(4, 150 << 20))
    assert none.chosen == NOTHING
    assert len(none.skipped) == 4
    assert "1 workers: prefetching one batch each" in none.skipped[0]


def test_what_is_hidden_already_is_left_as_it_is() -> None:
    now = LoaderSettings(workers=2)
    found, _ = tuned(parts(decoding=0.001), Consumer(0.1), SearchLimits(4), now)
    assert found.chosen == now
    assert len(found.tried) == 1


def test_a_step_that_was_disturbed_does_not_end_the_search() -> None:
    machine = Machine(parts(reading=0.08), Consumer(0.01), 2)
    search = SettingsSearch(machine.batch, NOTHING, Consumer(0.1), SearchLimits(2))
    found = searched(search, machine.run, 1e9, Clock(lambda: 0.0, lambda: 0.0, lambda: 0.0))
    assert found.chosen.workers == 2


def test_batches_that_are_asked_for_at_once() -> None:
    batch = parts(decoding=0.03, collating=0.01, whole=0.0005)
    found, _ = tuned(batch, Consumer(0.005), SearchLimits(2))
    assert found.chosen.whole
    assert found.chosen.workers == 0 or found.after_seconds < 0.0055


def test_uneven_samples_get_more_batches_ahead() -> None:
    batch = parts(reading=0.1, sample_spread=2.0)
    found, _ = tuned(batch, Consumer(0.02), SearchLimits(2))
    assert {one.settings.prefetch for one in found.tried} == {2, 4}


def test_time_that_is_up_ends_the_search_after_what_the_loader_has() -> None:
    machine = Machine(parts(reading=0.08), Consumer(0.02), 2)
    clock = Clock(lambda: machine.seconds, lambda: 0.0, lambda: 0.0)
    search = SettingsSearch(machine.batch, NOTHING, Consumer(0.02), SearchLimits(2))
    found = searched(search, machine.run, 0.5, clock)
    assert [one.settings for one in found.tried] == [NOTHING]
    assert found.chosen == NOTHING
    assert found.skipped
    assert all("out of time" in one for one in found.skipped)


def test_more_cores_than_here_are_modelled_and_said_so() -> None:
    batch, consumer = parts(decoding=0.12), Consumer(0.02)
    search = SettingsSearch(batch, NOTHING, consumer, SearchLimits(2))
    here = searched(search, Machine(batch, consumer, 2).run, 1e9)
    there = for_cores(here, search, 16)
    assert (here.source, there.source) == ("measured", "modelled")
    assert there.cores == 16
    assert here.chosen.workers <= 2 < there.chosen.workers <= 16
    assert there.after_seconds < here.after_seconds
    real, _ = tuned(batch, consumer, SearchLimits(16))
    assert there.after_seconds == pytest.approx(real.after_seconds, rel=0.25)


@pytest.mark.parametrize("workers", [0, 1, 4, 40])
def test_a_run_throws_away_what_was_read_ahead(workers: int) -> None:
    settings = LoaderSettings(workers=workers, prefetch=2)
    dropped, timed = window(settings)
    assert dropped >= min(settings.ahead, 40)
    assert timed >= max(8, 2 * workers)
