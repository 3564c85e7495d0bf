"""The input of a solver, a step and options that exclude each other if their claims overlap, and its results.

Also a lower bound on the added time, which no choice of options can beat. At a task that needs more than the
budget, options must free the difference, and each frees at most what it drops there, whatever else is chosen.
The cheapest way to do that with fractions of options, ordered by time per byte, is Dantzig's bound of the
knapsack ("Discrete-variable extremum problems", Operations Research 1957). The bound for the step is the
highest one over all tasks.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from torchtrim.executor.registry import Option
from torchtrim.step.edits import Edit
from torchtrim.step.incremental import Simulation, ties_of
from torchtrim.step.links import added_seconds
from torchtrim.step.simulate import Outcome, timeline
from torchtrim.step.step import DEVICE, Step

Chosen = tuple[int, ...]  # Numbers of options, in ascending order.
_Ranges = tuple[tuple[int, int, int], ...]


class Effect(NamedTuple):
    """The effect of one option alone on the live bytes, to first order.

    `frees` and `takes`: bytes during the tasks `first <= i < last`. `runs`: the tasks before which it inserts
    work. `most`: the most that it can free in combination with any other options.
    """

    frees: _Ranges
    takes: _Ranges
    runs: tuple[int, ...]
    most: _Ranges


class Problem:
    """Options with their edits, the seconds that each adds alone, and a simulation to try them in.

    `forced` edits are on in every choice, clash with no option, and add at least `forced_seconds`. `known`:
    the outcomes so far.
    """

    def __init__(
        self,
        step: Step,
        options: Sequence[Option],
        edits: Sequence[Edit],
        forced: Sequence[Edit] = (),
    ) -> None:
        self.step = step
        self.options = options
        self.edits = edits
        self.forced = forced
        self.seconds = [edit.seconds for edit in edits]
        self.forced_seconds = sum(edit.work_seconds for edit in forced)
        self._on = frozenset(range(len(edits), len(edits) + len(forced)))
        self._simulation = Simulation(step, [*edits, *forced])
        self.known: dict[Chosen, Outcome] = {}

    def only(self, numbers: Sequence[int]) -> Problem:
        """Return the problem restricted to these options."""
        options = [self.options[number] for number in numbers]
        return Problem(self.step, options, [self.edits[number] for number in numbers], self.forced)

    def run(self, chosen: Chosen) -> Outcome:
        """Return the outcome of the step with these options."""
        if chosen not in self.known:
            added = self._added(chosen)
            self.known[chosen] = self._with(chosen).outcome._replace(added_seconds=added)
        return self.known[chosen]

    def _added(self, chosen: Chosen) -> float:
        """Return the seconds that options add together; on a shared link, copies await each other."""
        edits = [*(self.edits[number] for number in chosen), *self.forced]
        if any(edit.trips for edit in edits):
            return added_seconds(self.step, edits)
        return self.forced_seconds + self.sum(chosen)

    @cached_property
    def is_additive(self) -> bool:
        """True if no choice can add less than the sum of its options, since none stalls on a copy alone."""
        return not any(trip.alone for edit in (*self.edits, *self.forced) for trip in edit.trips)

    def peak_from(self, chosen: Chosen, task: int) -> int:
        """Return the peak from a task on."""
        return self._with(chosen).peak_from(task)

    def _with(self, chosen: Chosen) -> Simulation:
        self._simulation.switch(self._simulation.on ^ self._on.union(chosen))
        return self._simulation

    def sum(self, options: Iterable[int]) -> float:
        """Return the sum of the seconds of options."""
        return sum(map(self.seconds.__getitem__, options))

    @cached_property
    def clashes(self) -> list[frozenset[int]]:
        """For each option, the options whose claims overlap its own."""
        clashing: list[frozenset[int]] = [frozenset()] * len(self.edits)
        for clique in cliques(self.edits):
            for number in clique:
                clashing[number] |= clique - {number}
        return clashing

    @cached_property
    def effects(self) -> list[Effect]:
        """The effect of each option, and then of each forced edit."""
        return [_effect(self.step, edit) for edit in (*self.edits, *self.forced)]

    def changes(self, option: int) -> int:
        """Return at how many places of the simulation an option changes the step."""
        return self._simulation.changes(option)

    def freed(self, option: int, task: int) -> int:
        """Return the bytes that an option frees while a task runs, to first order."""
        effect = self.effects[option]
        return _during(effect.frees, task) - _during(effect.takes, task)

    def apart(self, order: Iterable[int]) -> list[int]:
        """Return the options, in order, that exclude no earlier one."""
        taken: list[int] = []
        barred: set[int] = set()
        for number in order:
            if number not in barred:
                taken.append(number)
                barred |= self.clashes[number]
        return taken


def cliques(edits: Sequence[Edit]) -> list[frozenset[int]]:
    """Return the sets of edits, by number, that claim one task: at most one of each may be on."""
    spans = sorted(
        (span.first, span.last, number) for number, edit in enumerate(edits) for span in edit.claims
    )
    claimed: list[tuple[int, int]] = []
    sets: dict[frozenset[int], None] = {}
    for first, last, number in spans:
        claimed = [*((end, other) for end, other in claimed if end > first), (last, number)]
        sets[frozenset(other for _, other in claimed)] = None
    return [clique for clique in sets if len(clique) > 1]


def _effect(step: Step, edit: Edit) -> Effect:
    frees, takes, most = (
        [],
        [(b.first, b.last, b.bytes) for b in edit.blocks if b.pool == DEVICE],
        [],
    )
    for number, tie in ties_of(step, (edit,)).items():
        tensor = step.tensors[number]
        dropped = {hold for _, hold in tie.drops}
        end = tensor.end(dropped, (until for _, until in tie.needs))
        if end < tensor.death:
            frees.append((end, tensor.death, tensor.bytes))
        elif end > tensor.death:
            takes.append((tensor.death, end, tensor.bytes))
        if dropped:
            saved = {place for place, hold in enumerate(tensor.holds) if hold.saver >= 0}
            most.append((tensor.end(dropped | saved), tensor.death, tensor.bytes))
    for rise in edit.rises:
        freed = rise.task, rise.task + 1, step.tasks[rise.task].transient - rise.bytes
        frees.append(freed)
        most.append(freed)
    runs = tuple(insert.at for insert in edit.inserts)
    return Effect(tuple(frees), tuple(takes), runs, tuple(most))


_TASKS = 64  # Arbitrary; a bound over fewer tasks is lower but never wrong, and quicker.


def least_seconds(problem: Problem, budget: int) -> float:
    """Return a lower bound on the seconds that a choice within the budget adds; infinity if none can fit."""
    high = timeline(problem.step).high
    over = [task for task, size in enumerate(high) if size > budget]
    if not over:
        return problem.forced_seconds
    stride = max(len(over) // _TASKS, 1)
    tasks = {*over[::stride], max(over, key=high.__getitem__)}
    return problem.forced_seconds + max(_at(problem, task, high[task] - budget) for task in tasks)


def _at(problem: Problem, task: int, excess: int) -> float:
    excess -= sum(_during(effect.most, task) for effect in problem.effects[len(problem.edits) :])
    if excess <= 0:
        return 0.0
    offers = [
        (edit.work_seconds / freed, freed)
        for edit, effect in zip(problem.edits, problem.effects, strict=False)
        if (freed := _during(effect.most, task))
    ]
    total = 0.0
    for rate, freed in sorted(offers):
        if freed >= excess:
            return total + rate * excess
        total += rate * freed
        excess -= freed
    return float("inf")


def _during(ranges: _Ranges, task: int) -> int:
    return sum(size for first, last, size in ranges if first <= task < last)


class Point(NamedTuple):
    """A choice: its peak in bytes, its added seconds, and its options."""

    peak_bytes: int
    seconds: float
    chosen: Chosen


class Front:
    """Choices by rising peak and falling time, so a looser budget never gets a slower choice."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def add(self, point: Point) -> None:
        """Add a choice unless another is as low and as quick."""
        place = bisect_right(self.points, (point.peak_bytes, float("inf")))
        if place and self.points[place - 1].seconds <= point.seconds:
            return
        self.points = [
            other
            for other in self.points
            if other.peak_bytes < point.peak_bytes or other.seconds < point.seconds
        ]
        insort(self.points, point)

    def within(self, budget: int) -> Point | None:
        """Return the quickest choice whose peak is within the budget, or None."""
        place = bisect_right(self.points, (budget, float("inf")))
        return self.points[place - 1] if place else None

    @property
    def lowest(self) -> Point:
        """The choice with the smallest peak."""
        return self.points[0]


class Solution(NamedTuple):
    """The best choices found. `optimal`: no better ones exist."""

    front: Front
    optimal: bool


class Answer(NamedTuple):
    """A choice within the budget, or None without one. `proven`: no better choice exists.

    `bound`: a lower bound on the seconds that a choice within the budget adds; for the lowest choice, on its
    bytes.
    """

    chosen: Chosen | None
    bound: float
    proven: bool
