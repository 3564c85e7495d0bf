"""The integer program, against every choice there is, and the planner with and without it."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

import draws
from planner.solvers.test_solvers import CASES, brute, problem_of
from planner.test_planner import planner_of, profile_of
from step.random_steps import random_training
from torchtrim.executor.registry import Option
from torchtrim.planner import planner
from torchtrim.planner.linear import Constraint, LinearBuilder
from torchtrim.planner.problem import Problem
from torchtrim.planner.solvers import integer
from torchtrim.planner.solvers.integer import Effort, Integer, IntegerProgram
from torchtrim.records.budget import Budget
from torchtrim.step.rerun import rerun

pytest.importorskip("highspy")


@pytest.mark.parametrize("cases", draws.some(CASES[::5]), ids=str)
def test_it_proves_the_quickest_choice_of_every_budget(cases: range) -> None:
    for number in cases:
        rng = random.Random(number)
        problem = problem_of(rng, rng.randrange(1, 5))
        every = brute(problem.step, list(problem.edits))
        program = Integer(problem)
        for budget in sorted({size for size, _ in every}):
            best = min(seconds for size, seconds in every if size <= budget)
            answer = program.quickest(budget)
            assert answer.proven
            assert answer.chosen is not None
            assert problem.run(answer.chosen).peak_bytes <= budget
            assert problem.sum(answer.chosen) == pytest.approx(best, rel=1e-5, abs=1e-9)
            assert answer.bound <= best + 1e-9
        lowest = min(size for size, _ in every)
        assert program.quickest(lowest - 1) == (None, math.inf, True)
        chosen = program.lowest().chosen
        assert chosen is not None
        assert problem.run(chosen).peak_bytes == lowest


def test_a_hold_that_one_option_drops_twice_counts_once() -> None:
    """HiGHS refuses a row with a column twice, and a run of what it refused need not end."""
    for number in range(6):
        problem = problem_of(random.Random(number), 4)
        twice = [edit._replace(drops=edit.drops * 2) for edit in problem.edits]
        doubled = Problem(problem.step, problem.options, twice)
        for row in LinearBuilder(doubled).build().rows:
            columns = [column for column, _ in row.terms]
            assert len(columns) == len({*columns})
        every = brute(problem.step, list(problem.edits))
        budget = sorted(size for size, _ in every)[len(every) // 2]
        best = min(seconds for size, seconds in every if size <= budget)
        answer = Integer(doubled).quickest(budget)
        assert answer.proven
        assert answer.chosen is not None
        assert doubled.sum(answer.chosen) == pytest.approx(best, rel=1e-5, abs=1e-9)


def test_what_highs_refuses_is_not_run() -> None:
    twice = Constraint(1.0, math.inf, ((0, 1.0), (0, 1.0)))
    refused = integer.solve(IntegerProgram([0.0], [1.0], [1.0], 1, [twice]), Effort(5.0))
    assert refused == (None, -math.inf, False, False)


def test_it_begins_with_what_is_known_and_keeps_it_when_there_is_no_time() -> None:
    problem = problem_of(random.Random(3), 12)
    everything = tuple(problem.apart(range(len(problem.options))))
    budget = problem.run(everything).peak_bytes
    answer = Integer(problem).quickest(budget, everything, 0.0)
    assert not answer.proven or answer.chosen is not None
    assert answer.bound <= problem.sum(everything)


def test_plans_are_proven_and_without_the_solver_no_quicker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "_SEARCH", 600.0)
    monkeypatch.setattr(integer, "_ENOUGH", 600.0)
    profile = profile_of("blocks")
    proven = planner_of(profile, exclude=("replay",))
    lowest = proven.floor.outcome.peak_bytes
    monkeypatch.setattr(planner, "find_spec", lambda _: None)
    plain = planner_of(profile, exclude=("replay",))
    low, high = plain.floor.outcome.peak_bytes, plain.simulated_original
    assert lowest <= low
    for step in range(1, 8):
        budget = low + (high - low) * step // 8
        sure, found = proven.plan(Budget(budget)), plain.plan(Budget(budget))
        assert (sure.status, sure.gap) == ("optimal", 0.0)
        assert sure.predicted.step_seconds <= found.predicted.step_seconds
        assert found.bound_seconds is not None
        assert found.bound_seconds <= sure.predicted.step_seconds


@pytest.mark.parametrize("near", [0.0, 0.05, 0.5])
def test_what_is_near_enough_is_no_further_from_its_bound(
    near: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By as much of the step as is allowed, and within the budget; with nothing allowed, the quickest."""
    monkeypatch.setattr(integer, "_NEAR", near)
    monkeypatch.setattr(integer, "_ENOUGH", 0.0)
    for number in range(12):
        problem = problem_of(random.Random(number), 5)
        every = brute(problem.step, list(problem.edits))
        budget = sorted(size for size, _ in every)[len(every) // 3]
        best = min(seconds for size, seconds in every if size <= budget)
        answer = Integer(problem).quickest(budget)
        assert answer.chosen is not None
        assert problem.run(answer.chosen).peak_bytes <= budget
        allowed = near * problem.step.seconds + 1e-9
        assert answer.bound - 1e-9 <= best <= problem.sum(answer.chosen) + 1e-9
        assert problem.sum(answer.chosen) - answer.bound <= allowed + 1e-5 * best


def _nearly_alike(number: int) -> Problem:
    """Tensors of billions of bytes, many of which differ by a few hundred."""
    rng = random.Random(number)
    step, edits = random_training(rng, rng.randrange(3, 5))
    tensors = (
        one._replace(bytes=one.bytes // 10 * 10**9 + rng.randrange(600)) for one in step.tensors
    )
    tasks = (one._replace(transient=one.transient * 10**8) for one in step.tasks)
    step = replace(step, tensors=tuple(tensors), tasks=tuple(tasks))
    edits = [made for one in edits if (made := rerun(step, one.claims)) is not None]
    return Problem(step, [Option("recompute", str(i)) for i in range(len(edits))], edits)


@pytest.mark.parametrize("number", draws.some(range(1, 101)))
def test_a_budget_that_can_be_met_is_met_though_the_solver_rounds(number: int) -> None:
    problem = _nearly_alike(number)
    every = brute(problem.step, list(problem.edits))
    program = Integer(problem)
    for budget in sorted({size for size, _ in every})[::3]:
        answer = program.quickest(budget)
        assert answer.chosen is not None
        assert problem.run(answer.chosen).peak_bytes <= budget
        assert answer.bound <= min(seconds for size, seconds in every if size <= budget) + 1e-9
