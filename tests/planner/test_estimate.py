"""The largest length that fits, against trying every one."""

from __future__ import annotations

import random

import pytest

from torchtrim.planner.estimate import LargestLength, largest_length


def brute(peaks: list[int], budget: int) -> int:
    return max((n for n in range(1, len(peaks)) if peaks[n] <= budget), default=0)


@pytest.mark.parametrize("seed", range(200))
def test_it_is_what_trying_all_finds(seed: int) -> None:
    rng = random.Random(seed)
    steps = [rng.choice((0, 1, 7, 50, rng.randrange(1, 400))) for _ in range(rng.randrange(2, 90))]
    peaks = [rng.randrange(1000)]
    for step in steps:
        peaks.append(peaks[-1] + step)
    budget = rng.randrange(1, peaks[-1] + 100)
    now = rng.randrange(1, len(peaks))

    def peak_of(length: int) -> int | None:
        return peaks[length] if length < len(peaks) else None

    found = largest_length(peak_of, budget, now)
    assert found.length == brute(peaks, budget)
    assert found.peak == (peaks[found.length] if found.length else None)
    assert found.next_peak == peak_of(found.length + 1)


def test_what_grows_in_proportion_takes_few_tries() -> None:
    tried: list[int] = []

    def peak_of(length: int) -> int:
        tried.append(length)
        return 5_000_000 + 12_345 * length

    found = largest_length(peak_of, 2**34, 8)
    assert found.length == (2**34 - 5_000_000) // 12_345
    assert len(tried) < 16


def test_what_is_flat_at_first_takes_few_tries_and_another_budget_fewer() -> None:
    known: dict[int, int | None] = {}

    def peak_of(length: int) -> int:
        known[length] = max(1_500_000, 480_000 + 6_448 * length)
        return known[length] or 0

    assert largest_length(peak_of, 1_756_018, 2, known).length == 197
    assert len(known) < 20
    before = len(known)
    assert largest_length(peak_of, 1_740_000, 2, known).length == 195
    assert len(known) < before + 6


def test_a_crooked_line_takes_no_more_than_a_few_times_as_many() -> None:
    tried: list[int] = []

    def peak_of(length: int) -> int:
        tried.append(length)
        return 10 * length + (10**9 if length > 777_777 else 0)

    assert largest_length(peak_of, 10**8, 1).length == 777_777
    assert len(tried) < 120


def test_lengths_that_are_too_short_to_run_are_passed_over() -> None:
    found = largest_length(lambda n: None if n < 4 else 100 + 10 * n, 165, 64)
    assert found.length == 6


def test_what_runs_is_too_large_and_what_is_smaller_does_not_run() -> None:
    assert largest_length(lambda n: None if n < 4 else 100 + 10 * n, 120, 64).length == 0


def test_nothing_fits() -> None:
    assert largest_length(lambda length: 100 + length, 50, 8) == LargestLength(
        0, None, 101, 256, falls=False
    )


def test_what_never_grows_ends() -> None:
    assert largest_length(lambda length: 10, 50, 8).length == 2**30


SHAPES = {
    "padded to 64": lambda n: 1000 + 10 * (-(-n // 64) * 64),
    "in parts from 1024 on": lambda n: 100 + (n * n // 50 if n <= 1024 else 5 * n),
    "cheap in blocks of 8": lambda n: 100 + 3 * n + (4000 if n % 8 else 0),
    "cheap in blocks of 32": lambda n: 100 + 3 * n + (4000 if n % 32 else 0),
    "odd ones are dearer": lambda n: 100 + 3 * n + n % 2 * 1000,
}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("shape", SHAPES)
def test_what_does_not_grow_with_every_length(shape: str, seed: int) -> None:
    peak_at = SHAPES[shape]
    rng = random.Random(seed)
    budget = rng.randrange(1700, 30_000)
    tried: list[int] = []

    def peak_of(length: int) -> int:
        tried.append(length)
        return peak_at(length)

    found = largest_length(peak_of, budget, rng.choice((1, 8, 512, 3000)))
    assert peak_at(found.length) == found.peak
    assert found.peak is not None
    assert found.next_peak is not None
    assert found.peak <= budget < found.next_peak == peak_at(found.length + 1)
    if shape in ("padded to 64", "in parts from 1024 on"):
        assert found.length == max(n for n in range(1, 20_000) if peak_at(n) <= budget)
    assert found.tried == max(tried) > found.length
    in_order = [peak_at(n) for n in sorted(tried)]
    assert found.falls == (in_order != sorted(in_order))
    assert len(tried) == len(set(tried)) < 100


def test_a_sawtooth_gives_what_fits_and_says_that_it_falls() -> None:
    found = largest_length(lambda n: 100 + 3 * n + n % 256 * 20, 4000, 32)
    assert found.falls
    assert 100 + 3 * found.length + found.length % 256 * 20 <= 4000


def test_a_length_that_fails_among_others_that_run_is_not_too_short() -> None:
    found = largest_length(lambda length: None if length == 7 else 10 * length, 100, 4)
    assert (found.length, found.peak) == (10, 100)
