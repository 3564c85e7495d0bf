"""The effort of a solver, which is counted: on a clock, what else runs would decide on a plan."""

from __future__ import annotations

import contextlib
import math
import random
import threading
from collections.abc import Iterator

import pytest

from torchtrim.planner.linear import Constraint
from torchtrim.planner.solvers import integer
from torchtrim.planner.solvers.integer import Effort, IntegerProgram, ProgramAnswer, solve

pytest.importorskip("highspy")


def knapsacks(columns: int = 60, rows: int = 12) -> IntegerProgram:
    """Return a program whose best answer takes a solver long."""
    rng = random.Random(1)
    weights = [[rng.randrange(10, 100) for _ in range(columns)] for _ in range(rows)]
    return IntegerProgram(
        lower=[0.0] * columns,
        upper=[1.0] * columns,
        costs=[-float(rng.randrange(10, 100)) for _ in range(columns)],
        integers=columns,
        rows=[
            Constraint(-math.inf, sum(row) / 3, tuple(enumerate(map(float, row))))
            for row in weights
        ],
    )


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Have another thread compute all the while."""
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def solved(seconds: float) -> tuple[list[float], ProgramAnswer, float]:
    """Return the answer of an effort, and what is left of it."""
    effort = Effort(seconds)
    answer = solve(knapsacks(), effort)
    assert answer.values is not None
    return answer.values.tolist(), answer._replace(values=None), effort.left


@pytest.mark.parametrize("seconds", [0.05, 0.1])
def test_an_interrupted_solver_finds_the_same_beside_a_busy_thread(seconds: float) -> None:
    alone = solved(seconds)
    with busy():
        beside = solved(seconds)
    assert alone == beside
    _, answer, left = alone
    assert not answer.proven
    assert left < 0


def test_an_answer_of_more_effort_is_no_worse() -> None:
    bounds = [solved(seconds)[1].bound for seconds in (0.05, 0.1, 0.2)]
    assert bounds == sorted(bounds)


def test_fractions_take_iterations_and_none_are_known_without() -> None:
    program = knapsacks()
    whole = Effort(1.0)
    relaxed = IntegerProgram(program.lower, program.upper, program.costs, 0, program.rows)
    assert solve(relaxed, whole).proven
    assert 0 < whole.left < 1
    begun = integer._BEGIN * sum(len(row.terms) for row in program.rows)
    assert solve(relaxed, Effort(begun)).values is None
