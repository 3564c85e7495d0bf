"""Aims of a planner, for a program that counts more than the code needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from torchtrim.compiled.choose import Saved
from torchtrim.compiled.joint import Joint, Value
from torchtrim.compiled.memory import Simulated
from torchtrim.compiled.planning import _JointPlanner

LESS: Saved = {"graph": frozenset()}
WHOLE, LEAST, BUDGET = 1000, 500, 510
AIM = int(0.985 * BUDGET)


class _Graphs:
    """Graphs that need 1,000 bytes, and 500 with less saved."""

    def memory(self, saved: Saved, _: Mapping[str, int]) -> Simulated:
        peak = WHOLE if saved["graph"] else LEAST
        return Simulated((peak,), peak, peak, 0, ())


class _Program:
    """A program whose least counts as some bytes. `aims`: those it was asked for."""

    def __init__(self, least: int) -> None:
        self.least, self.whole, self.keeps = least, 1.0, False
        self.aims: list[int] = []

    def correct(self, *_: Any) -> None:
        """Learn nothing."""

    def choose(self, budget: int, _: float) -> Saved | None:
        self.aims.append(budget)
        return LESS if budget >= self.least else None

    def improved(self, saved: Saved, *_: Any) -> Saved:
        return saved

    def seconds(self, saved: Saved) -> float:
        return 0.0 if saved["graph"] else 0.1


def planner(program: _Program) -> _JointPlanner:
    value = Value("value", 500, 0.1, (), (0,), stays=True, can_save=True, can_redo=True)
    joint = Joint("graph", (value,), (1.0,), (0,), frozenset({0}))
    return _JointPlanner(cast(Any, _Graphs()), [joint], cast(Any, program), {}, None)


@pytest.mark.parametrize(("least", "tried"), [(1.05, 1), (1.15, 2), (1.3, 3)])
def test_a_program_that_counts_too_much_is_asked_for_more(least: float, tried: int) -> None:
    program = _Program(int(least * AIM))
    choice = planner(program).plan(BUDGET)
    assert choice is not None
    assert choice.saved == LESS
    assert len(program.aims) == 1 + tried


def test_without_a_choice_for_more_it_is_asked_for_less() -> None:
    program = _Program(2 * WHOLE)
    assert planner(program).plan(BUDGET) is None
    assert program.aims[-1] < program.aims[0] < max(program.aims)
