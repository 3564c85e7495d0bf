"""How quick a plan could be at best: a bound that no choice of options can beat.

At a task that needs more than the budget, options must free the difference; they free at most what they
drop there, whatever else is chosen. The cheapest way to do that in fractions of options, by bytes for their
time, is Dantzig's bound of the knapsack ("Discrete-variable extremum problems", Operations Research 1957).
The highest bound over the tasks holds for the step.
"""

from __future__ import annotations

from torchtrim.planner.problem import Effect, Problem
from torchtrim.step.simulate import timeline

_TASKS = 64  # A bound over fewer tasks is lower, never wrong. Arbitrary; keeps it quick.


def least_seconds(problem: Problem, budget: int) -> float:
    """Seconds that any choice within the budget adds at least; infinity where none can be within."""
    high = timeline(problem.step).high
    over = [task for task, size in enumerate(high) if size > budget]
    if not over:
        return problem.forced_seconds
    stride = max(len(over) // _TASKS, 1)
    tasks = {*over[::stride], max(over, key=high.__getitem__)}
    return problem.forced_seconds + max(_at(problem, task, high[task] - budget) for task in tasks)


def _at(problem: Problem, task: int, excess: int) -> float:
    excess -= sum(_most(effect, task) for effect in problem.forced_effects)
    if excess <= 0:
        return 0.0
    offers = []
    for number, effect in enumerate(problem.effects):
        freed = _most(effect, task)
        if freed:
            offers.append((problem.work_seconds[number] / freed, freed))
    offers.sort()
    total = 0.0
    for rate, freed in offers:
        if freed >= excess:
            return total + rate * excess
        total += rate * freed
        excess -= freed
    return float("inf")


def _most(effect: Effect, task: int) -> int:
    return sum(size for first, last, size in effect.most if first <= task < last)
