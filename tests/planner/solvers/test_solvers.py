"""What the solvers choose, against every choice there is."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import combinations, pairwise

import pytest

import draws
from step.oracle import peak
from step.random_steps import random_training
from torchtrim.executor.registry import Option
from torchtrim.planner.problem import Problem, Solution, least_seconds
from torchtrim.planner.solvers.search import search, solve_exactly
from torchtrim.step.edits import Edit
from torchtrim.step.step import Step

CASES = [range(start, start + 10) for start in range(0, 500, 10)]


def problem_of(rng: random.Random, layers: int) -> Problem:
    step, edits = random_training(rng, layers)
    options = []
    for number, edit in enumerate(edits):
        cut = ("chain", number, number + 1) if number < layers else None
        options.append(Option("recompute", str(number), edit.claims, cut))
    return Problem(step, options, edits)


def brute(step: Step, edits: list[Edit]) -> list[tuple[int, float]]:
    """Peak and seconds of every set of options that do not overlap."""
    found = []
    for size in range(len(edits) + 1):
        for chosen in combinations(edits, size):
            spans = sorted(span for edit in chosen for span in edit.claims)
            if all(a.last <= b.first for a, b in pairwise(spans)):
                found.append((peak(step, chosen), sum(edit.seconds for edit in chosen)))
    return found


@pytest.mark.parametrize("cases", draws.some(CASES), ids=str)
@pytest.mark.parametrize("solver", [solve_exactly, search], ids=["exact", "local"])
def test_within_2_percent_of_the_quickest_and_never_over_the_budget(
    solver: Callable[[Problem], Solution | None], cases: range
) -> None:
    for number in cases:
        rng = random.Random(number)
        problem = problem_of(rng, rng.randrange(1, 5))
        solved = solver(problem)
        assert solved is not None
        every = brute(problem.step, list(problem.edits))
        whole = sum(task.seconds for task in problem.step.tasks)
        for budget in sorted({size for size, _ in every}):
            best = min(seconds for size, seconds in every if size <= budget)
            point = solved.front.within(budget)
            assert point is not None
            edits = [problem.edits[i] for i in point.chosen]
            assert peak(problem.step, edits) == point.peak_bytes <= budget
            assert whole + point.seconds <= 1.02 * (whole + best)
            assert least_seconds(problem, budget) <= best + 1e-12
        assert solved.front.within(min(size for size, _ in every) - 1) is None


@pytest.mark.parametrize("cases", draws.some(CASES), ids=str)
def test_a_looser_budget_never_gets_a_slower_plan(cases: range) -> None:
    for number in cases:
        rng = random.Random(number)
        problem = problem_of(rng, rng.randrange(1, 9))
        front = search(problem).front
        low, high = front.lowest.peak_bytes, problem.run(()).peak_bytes
        before = math.inf
        for step in range(21):
            point = front.within(low + (high - low) * step // 20)
            assert point is not None
            assert point.seconds <= before
            before = point.seconds
        assert before == 0.0


def test_many_sets_are_not_for_the_exact_solver() -> None:
    assert solve_exactly(problem_of(random.Random(0), 14)) is None
