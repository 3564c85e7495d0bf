"""Scripts drawn from people's habits; `bench.habits` runs them under torchtrim and plain."""

from __future__ import annotations

import ast

from bench.habits.script import PLAIN, Habits, drawn, simpler, text_of

import draws


def seeds(count: int) -> range:
    first = draws.seed() % 2**31
    return range(first, first + count)


def test_every_script_compiles_and_is_the_same_for_its_seed() -> None:
    for seed in seeds(draws.count(1_000)):
        text = text_of(drawn(seed))
        ast.parse(text)
        assert text == text_of(drawn(seed))


def test_checkpointed_blocks_are_all_that_a_person_changes() -> None:
    habits = Habits()
    plain, each, second = (text_of(habits, every).splitlines() for every in (0, 1, 2))
    assert sum(a != b for a, b in zip(plain, each, strict=True)) == 1
    assert sum(a != b for a, b in zip(plain, second, strict=True)) == 1


def test_simpler_scripts_have_one_habit_less() -> None:
    habits = drawn(draws.seed())
    special = sum(name != PLAIN[kind] for kind, name in habits.one.items())
    fewer = list(simpler(habits))
    assert len(fewer) >= special
    assert habits not in fewer
