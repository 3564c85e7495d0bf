"""How many cases are drawn at random, and from which seed.

`make test` draws a few from a seed that is new each time and stands at the top of its output;
`TORCHTRIM_TEST_SEED=N make test` draws the same again. `make test-all` (`pytest --full`) tries all cases.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

from hypothesis import HealthCheck, settings

T = TypeVar("T")
SEED_NAME: Final = "TORCHTRIM_TEST_SEED"
FULL_NAME: Final = "TORCHTRIM_TEST_FULL"
FEWER: Final = 16
DRAWING: Final = ("draws", "hypothesis", "proving")
"""Modules that draw, or whose functions do."""


def begin(*, full: bool) -> None:
    """Set what this process and those that it starts draw."""
    os.environ[FULL_NAME] = "1" if full else ""
    os.environ.setdefault(SEED_NAME, str(random.SystemRandom().randrange(2**32)))
    sound = {"deadline": None, "derandomize": False, "print_blob": True, "database": None}
    slow = [HealthCheck.too_slow]
    settings.register_profile("draws", max_examples=count(100), suppress_health_check=slow, **sound)
    settings.load_profile("draws")


def is_full() -> bool:
    """Whether all cases are tried."""
    return bool(os.environ.get(FULL_NAME))


def seed() -> int:
    """That of this run."""
    return int(os.environ.get(SEED_NAME, "0"))


def count(every: int) -> int:
    """How many of so many draws are made: a sixteenth, and ten at least, unless all are."""
    return every if is_full() else min(every, max(10, every // FEWER))


def some(cases: Sequence[T]) -> Sequence[T]:
    """The cases to be tried, in order: all, or some at random."""
    if is_full():
        return cases
    chosen = random.Random(seed()).sample(range(len(cases)), count(len(cases)))
    return [cases[number] for number in sorted(chosen)]


def orders(every: int) -> tuple[str, ...]:
    """Orders of streams, as `--streams` takes them: early, late, and one random one, or all of so many."""
    seeds = range(every) if is_full() else random.Random(seed()).sample(range(every), 1)
    return ("early", "late", *(f"random:{number}" for number in seeds))


@functools.cache
def are_named_in(file: Path) -> bool:
    """Whether a file of tests names a module that draws."""
    text = file.read_text(encoding="utf-8")
    return any(name in text for name in DRAWING)
