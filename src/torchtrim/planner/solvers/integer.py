"""An integer program: the quickest choice within a budget, and a bound that no choice can beat.

It starts from the best choice of the local search, and grows by moments whose memory exceeds the budget.
There are thousands, but only a few matter. So the program is solved with the highest moment alone, the
moments that exceed the budget in its answer are added, and it is solved again: first for fractions of
options, which is quick, then for whole ones. These are the cutting planes of Dantzig, Fulkerson and Johnson,
"Solution of a large-scale traveling-salesman problem" (1954). `pip install torchtrim[solver]` installs HiGHS
(Huangfu and Hall, "Parallelizing the dual revised simplex method", 2018).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple

import numpy

from torchtrim.planner.linear import Constraint, Linear, LinearBuilder
from torchtrim.planner.problem import Answer, Chosen, Problem

_GAP = 1e-6  # The tolerance of the solver, so a proven answer is optimal apart from rounding.
_PATIENCE = 20.0
"""Arbitrary; wall time of a solver that never looks up, in multiples of its seconds."""
# About what one core takes for a simplex iteration; and for each term of the rows: to begin a program, for
# an iteration, and from one call back of HiGHS to the next, at the root with its cuts or deeper in the tree.
_ITERATION, _BEGIN, _PER_TERM, _AT_ROOT, _IN_TREE = 3e-5, 2e-6, 1e-9, 3e-6, 1e-7
_MOST_ITERATIONS = 2**31 - 1


class Effort:
    """Seconds of one core that solvers may take, told by counts of their work.

    On a clock a plan would depend on what else the machine does. `left`: what is not used up.
    """

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    def spend(self, seconds: float) -> None:
        """Use up some seconds."""
        self.left -= seconds


@dataclass(frozen=True)
class IntegerProgram:
    """A minimization of `costs` over columns between `lower` and `upper`, the first `integers` whole.

    `near`: how far above the bound an answer may be if the search for the best takes long.
    """

    lower: Sequence[float]
    upper: Sequence[float]
    costs: Sequence[float]
    integers: int
    rows: Sequence[Constraint]
    near: float = 0.0


class ProgramAnswer(NamedTuple):
    """`values` of the columns, or None without a solution, and a lower bound on all others.

    `infeasible`: no values satisfy the rows. `proven`: no better values exist, apart from rounding.
    """

    values: Any
    bound: float
    infeasible: bool
    proven: bool


def solve(
    program: IntegerProgram, effort: Effort, start: Sequence[int] | None = None, enough: float = 0.0
) -> ProgramAnswer:
    """Solve a program within an effort. `start`: whole columns that are 1 in a known solution.

    The search for the best continues for `enough` seconds after it finds an answer near the bound.
    """
    terms = sum(len(row.terms) for row in program.rows)
    iteration = _ITERATION + _PER_TERM * terms
    effort.spend(_BEGIN * terms)
    highspy: Any = import_module("highspy")
    solver = highspy.Highs()
    for name, value in (
        ("output_flag", False),
        ("random_seed", 0),
        ("threads", 1),
        ("time_limit", _PATIENCE * max(effort.left, 1.0)),
        ("simplex_iteration_limit", int(min(max(effort.left / iteration, 0), _MOST_ITERATIONS))),
        ("mip_rel_gap", _GAP),
        ("mip_abs_gap", _GAP),
    ):
        solver.setOptionValue(name, value)
    if solver.passModel(_highs_model(highspy, program)) == highspy.HighsStatus.kError:
        return ProgramAnswer(
            None, -math.inf, infeasible=False, proven=False
        )  # `run` might never end
    if start is not None and program.integers:
        values = numpy.zeros(program.integers)
        values[list(start)] = 1.0
        numbers = numpy.arange(program.integers, dtype=numpy.int32)
        solver.setSolution(program.integers, numbers, values)
    if program.integers:
        solver.cbMipInterrupt += _interrupt_when_near(program.near, terms, effort, enough)
    if solver.run() == highspy.HighsStatus.kError:
        # It may fail beside the user's threads, but not with new threads.
        highspy.Highs.resetGlobalScheduler(True)
        if solver.run() == highspy.HighsStatus.kError:
            return ProgramAnswer(None, -math.inf, infeasible=False, proven=False)
    if not program.integers:
        effort.spend(solver.getInfo().simplex_iteration_count * iteration)
    return _solved(highspy, solver, whole=bool(program.integers))


def _interrupt_when_near(near: float, terms: int, effort: Effort, enough: float) -> Any:
    """Return a callback that stops the solver when the effort is spent, or its answer is near enough."""
    until = effort.left - enough

    def look(event: Any) -> None:
        found = event.data_out
        effort.spend(terms * (_IN_TREE if found.mip_node_count > 0 else _AT_ROOT))
        is_near = found.mip_primal_bound - found.mip_dual_bound <= near
        event.data_in.user_interrupt = effort.left < 0 or (effort.left < until and is_near)

    return look


def _solved(highspy: Any, solver: Any, *, whole: bool) -> ProgramAnswer:
    status, info = solver.getModelStatus(), solver.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        return ProgramAnswer(None, math.inf, infeasible=True, proven=True)
    proven = status == highspy.HighsModelStatus.kOptimal
    objective = info.objective_function_value
    known = proven or (whole and math.isfinite(objective))
    values = numpy.array(solver.getSolution().col_value) if known else None
    bound = info.mip_dual_bound if whole else objective if proven else 0.0
    return ProgramAnswer(values, bound, infeasible=False, proven=proven)


def _highs_model(highspy: Any, program: IntegerProgram) -> Any:
    model = highspy.HighsLp()
    columns = len(program.lower)
    model.num_col_, model.num_row_ = columns, len(program.rows)
    model.col_cost_ = numpy.array(program.costs, dtype=float)
    model.col_lower_ = numpy.array(program.lower, dtype=float)
    model.col_upper_ = numpy.array(program.upper, dtype=float)
    model.row_lower_ = numpy.array([row.least for row in program.rows])
    model.row_upper_ = numpy.array([row.most for row in program.rows])
    terms = [term for row in program.rows for term in row.terms]
    matrix = model.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_ = numpy.cumsum([0, *(len(row.terms) for row in program.rows)])
    matrix.index_ = numpy.array([column for column, _ in terms])
    matrix.value_ = numpy.array([factor for _, factor in terms], dtype=float)
    kind = highspy.HighsVarType
    if program.integers:
        rest = columns - program.integers
        model.integrality_ = [kind.kInteger] * program.integers + [kind.kContinuous] * rest
    return model


# The peak has this many units of bytes, and the solver treats values that differ by 1e-6 as equal.
# Its rounding adds up, hence the slack; every choice is simulated before it counts.
_UNITS = 4096
_SLACK = 1e-4  # In units, see above.
_JOIN = 24  # Arbitrary; enough that few rounds are needed, few enough that the program stays small.
_ENOUGH = 1.0  # Arbitrary; seconds to look for the best choice when one near it is known.
_IMPOSSIBLE = Answer(None, math.inf, proven=True)


class MomentMemory:
    """Memory at each moment, for values of the columns."""

    def __init__(self, model: Linear) -> None:
        self._rises = numpy.array(model.rises, dtype=float)
        self._changes = _Sparse(model.changes)
        self._moments = _Sparse([moment.terms for moment in model.moments])
        self._stretches = numpy.array([moment.stretch for moment in model.moments], dtype=int)
        self._bytes = numpy.array([moment.bytes for moment in model.moments], dtype=float)

    def of(self, values: Any) -> Any:
        """Return the bytes at each moment."""
        levels = numpy.cumsum(self._rises + self._changes.times(values))
        return levels[self._stretches] + self._bytes + self._moments.times(values)

    def worst(self, values: Any, limit: float, most: int, known: set[int]) -> list[int]:
        """Return moments over a limit, except `known` ones: the highest in each of about `most` parts."""
        high = self.of(values)
        high[list(known)] = -math.inf
        over = numpy.flatnonzero(high > limit)
        order = over[numpy.argsort(-high[over], kind="stable")]
        width = max(len(self._rises) // most, 1)
        highest: dict[int, int] = {}
        for moment in order.tolist():
            highest.setdefault(int(self._stretches[moment]) // width, moment)
        return list(highest.values())


class _Sparse:
    def __init__(self, rows: Sequence[Sequence[tuple[int, float]]]) -> None:
        self._rows = len(rows)
        self._row = numpy.repeat(numpy.arange(len(rows)), [len(row) for row in rows])
        self._column = numpy.array([column for row in rows for column, _ in row], dtype=int)
        self._factor = numpy.array([factor for row in rows for _, factor in row], dtype=float)

    def times(self, values: Any) -> Any:
        products = self._factor * values[self._column]
        return numpy.bincount(self._row, products, minlength=self._rows)


_LOWEST = 5.0  # Arbitrary; seconds to search for the lowest peak.
_MOST_TERMS = 400_000  # Arbitrary; larger programs are not solved within the seconds of a search.
# How much slower than the bound, as a share of the step, a choice may be if the search takes long: less
# than runs of one step differ by. On bench/ratios/wavenet.py 0.0025 took 22 s more for the same choice.
_NEAR = 1e-2
_NEAR_UNITS = 4.0  # Arbitrary; the same for the lowest peak, in units of 1/4096 of the peak.


class Integer:
    """The integer program of one problem. `fits`: it is small enough to solve while a person waits."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.model = LinearBuilder(problem).build()
        self.fits = sum(len(row.terms) for row in self.model.rows) <= _MOST_TERMS

    @cached_property
    def heights(self) -> MomentMemory:
        """Memory at each moment."""
        return MomentMemory(self.model)

    def quickest(self, budget: int, start: Chosen | None = None, limit: float = math.inf) -> Answer:
        """Return the quickest choice within a budget, after a search of at most `limit` seconds.

        The bound is infinite if no choice is within the budget.
        """
        seconds = self.problem.seconds
        longest = max(map(abs, seconds), default=0.0) or 1.0
        near = _NEAR * self.problem.step.seconds / longest
        costs = [each / longest for each in seconds]
        answer = MomentSearch(self, costs, budget, near, limit).run(start)
        bound = self.problem.forced_seconds + max(answer.bound, 0.0) * longest
        return answer._replace(bound=bound)

    def lowest(self, start: Chosen | None = None) -> Answer:
        """Return the choice with the smallest peak."""
        return MomentSearch(self, (), None, _NEAR_UNITS, _LOWEST).run(start)


class MomentSearch:
    """One program, solved with more and more moments until its answer holds at all of them.

    `limit`: a budget, or None to minimize the peak, which is then a separate column. `near`: see
    `IntegerProgram`. `seconds`: the effort.
    """

    def __init__(
        self,
        program: Integer,
        costs: Sequence[float],
        limit: int | None,
        near: float,
        seconds: float,
    ) -> None:
        self._problem, self._limit, self._near = program.problem, limit, near
        self._model, self._heights = model, heights = program.model, program.heights
        highest = heights.of(numpy.zeros(model.columns)).max(initial=1.0)
        self._unit = max(highest / _UNITS, 1e-3)
        self._rows = list(model.rows)
        self._moments: set[int] = set()
        self._costs = [*costs, *[0.0] * (model.columns - len(costs))]
        self._effort = Effort(seconds)
        self._bound = -math.inf

    def run(self, start: Chosen | None) -> Answer:
        """Return the answer, starting from a known choice."""
        self._join(self._heights.worst(numpy.zeros(self._model.columns), -math.inf, 1, set()))
        if not self._ask_in_fractions():
            return _IMPOSSIBLE
        return self._ask_in_whole(None if start is None else (*start, *self._forced))

    def _ask_in_whole(self, known: Chosen | None) -> Answer:
        best, lowest, enough = None, math.inf, 0.0
        while self._effort.left > 0:
            found = solve(self._program(whole=True), self._effort, known, enough)
            if found.infeasible:
                return _IMPOSSIBLE
            self._bound = max(self._bound, found.bound)
            if found.values is None:
                break
            values = numpy.round(found.values[: self._model.columns])
            chosen = tuple(numpy.flatnonzero(values[: self._forced.start] > 0.5).tolist())
            if over := self._over(found.values, values):
                high = self._heights.of(values).max(initial=0.0)
                if self._limit is None and high < lowest:
                    best, lowest = chosen, high
                self._join(over)
            elif not self._fits(chosen):
                on = {*chosen, *self._forced}
                terms = tuple((i, 1.0 if i in on else -1.0) for i in range(self._model.options))
                self._rows.append(Constraint(-math.inf, len(on) - 1.0, terms))
            elif found.proven or enough:
                return Answer(chosen, self._bytes_or_costs, found.proven)
            else:
                best, known, enough = chosen, (*chosen, *self._forced), _ENOUGH
        return Answer(best, self._bytes_or_costs, proven=False)

    def _fits(self, chosen: Chosen) -> bool:
        """Return True if a choice is within the limit to the byte: the solver takes near values for equal."""
        return self._limit is None or self._problem.run(chosen).peak_bytes <= self._limit

    @property
    def _bytes_or_costs(self) -> float:
        unit = self._unit if self._limit is None else 1.0
        return max(self._bound, 0.0) * unit

    @property
    def _forced(self) -> range:
        return range(self._model.options - self._model.forced, self._model.options)

    def _ask_in_fractions(self) -> bool:
        """Add the moments that fractions of options cannot keep within the limit; False if none can fit."""
        while self._effort.left > 0:
            found = solve(self._program(whole=False), self._effort)
            if found.infeasible:
                return False
            if found.values is None:
                return True
            self._bound = max(self._bound, found.bound)
            over = self._over(found.values, found.values[: self._model.columns])
            if not over:
                return True
            self._join(over)
        return True

    def _over(self, found: Any, values: Any) -> list[int]:
        limit = self._limit if self._limit is not None else found[-1] * self._unit
        return self._heights.worst(values, limit + 2 * _SLACK * self._unit, _JOIN, self._moments)

    def _join(self, moments: Sequence[int]) -> None:
        """Add the rows that keep memory at these moments under the limit, in units."""
        for number in moments:
            self._moments.add(number)
            moment = self._model.at(self._model.moments[number])
            terms = tuple((column, size / self._unit) for column, size in moment.terms)
            most = -moment.bytes / self._unit
            if self._limit is None:
                terms = (*terms, (self._model.columns, -1.0))
            else:
                most = (self._limit - moment.bytes) / self._unit + _SLACK
            self._rows.append(Constraint(-math.inf, most, terms))

    def _program(self, *, whole: bool) -> IntegerProgram:
        model = self._model
        lower = [0.0] * model.columns
        lower[self._forced.start : self._forced.stop] = [1.0] * model.forced
        upper, costs = [1.0] * model.columns, self._costs
        if self._limit is None:
            lower, upper, costs = [*lower, 0.0], [*upper, math.inf], [*costs, 1.0]
        return IntegerProgram(
            lower, upper, costs, model.options if whole else 0, self._rows, self._near
        )
