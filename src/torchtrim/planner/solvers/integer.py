"""The quickest choice within a budget, proven: the problem's linear constraints as an integer program.

HiGHS (Huangfu and Hall, "Parallelizing the dual revised simplex method", 2018) solves it, where highspy is
installed: `pip install torchtrim[solver]`. It begins with the best choice that the local search knows, so
that it has to prove more than to find.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtrim.planner.linear import Linear, Row, Top, linear
from torchtrim.planner.problem import Chosen, Problem

if TYPE_CHECKING:
    import numpy

_SECONDS = 4.0
_MOST_TERMS = 400_000
_GAP = 1e-6
# Bytes are given in units of which the peak has so many, and the solver takes what is off by 1e-6 for equal.
# Its rounding adds up along a step, hence the slack; every choice is simulated before it counts.
_UNITS = 4096
_SLACK = 1e-4


class Answer(NamedTuple):
    """A choice within the budget, None if none was found, and whether none is better.

    `bound`: what any choice within the budget adds at least, in seconds; of the lowest, its bytes.
    """

    chosen: Chosen | None
    bound: float
    proven: bool


class Integer:
    """The integer program of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    @staticmethod
    def installed() -> bool:
        """Whether there is a solver."""
        return importlib.util.find_spec("highspy") is not None

    @cached_property
    def _linear(self) -> Linear:
        return linear(self._problem)

    @property
    def _forced(self) -> range:
        return range(self._linear.options - self._linear.forced, self._linear.options)

    @cached_property
    def _unit(self) -> float:
        return max(self._linear.peak / _UNITS, 1e-3)

    @cached_property
    def _rows(self) -> list[Row]:
        """The rows of every budget, in units."""
        return [_scaled(row, self._linear.first_level, self._unit) for row in self._linear.rows]

    @cached_property
    def fits(self) -> bool:
        """Whether the program is small enough to be solved while a person waits."""
        return sum(len(row.terms) for row in self._linear.rows) <= _MOST_TERMS

    def quickest(self, budget: int, start: Chosen | None = None) -> Answer:
        """The choice within a budget that adds least time; infinity bounds a budget that none is within."""
        seconds = self._problem.seconds
        longest = max(map(abs, seconds), default=0.0) or 1.0
        found = self._solve(self._within(budget), [one / longest for one in seconds], start)
        bound = self._problem.forced_seconds + found.bound * longest
        chosen, answer = found.chosen, found._replace(bound=bound)
        if chosen is not None and self._problem.run(chosen).peak_bytes > budget:
            return Answer(None, answer.bound, proven=False)
        return answer

    def lowest(self, start: Chosen | None = None) -> Answer:
        """The choice with the smallest peak."""
        return self._solve(self._lowering(), [], start)

    def _within(self, budget: int) -> _Program:
        program, model, unit = _Program(self._linear, self._rows), self._linear, self._unit
        limit = budget / unit + _SLACK
        for top in model.tops:
            least = limit - top.bytes / unit
            if top.changes:
                program.rows.append(_under(least, top, unit))
            else:
                program.upper[top.level] = least
        for level, option, size in model.inserts:
            program.rows.append(Row(-math.inf, limit, ((level, 1.0), (option, size / unit))))
        return program

    def _lowering(self) -> _Program:
        program, model, unit = _Program(self._linear, self._rows), self._linear, self._unit
        peak = len(program.upper)
        program.upper.append(math.inf)
        program.minimised = peak
        for top in model.tops:
            row = _under(-top.bytes / unit, top, unit)
            program.rows.append(row._replace(terms=(*row.terms, (peak, -1.0))))
        for level, option, size in model.inserts:
            terms_ = ((level, 1.0), (option, size / unit), (peak, -1.0))
            program.rows.append(Row(-math.inf, 0.0, terms_))
        return program

    def _solve(self, program: _Program, costs: Sequence[float], start: Chosen | None) -> Answer:
        import highspy

        solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        for name, value in (
            ("output_flag", False),
            ("threads", 1),
            ("random_seed", 0),
            ("time_limit", _SECONDS),
            ("mip_rel_gap", _GAP),
            ("mip_abs_gap", _GAP),
        ):
            solver.setOptionValue(name, value)
        solver.passModel(program.of(highspy, costs))
        if start is not None:
            count = self._linear.options
            numbers, values = _started((*start, *self._forced), count)
            solver.setSolution(count, numbers, values)
        solver.run()
        return self._answer(highspy, solver, program)

    def _answer(self, highspy: Any, solver: Any, program: _Program) -> Answer:
        status, info = solver.getModelStatus(), solver.getInfo()
        unit = self._unit if program.minimised is not None else 1.0
        if status == highspy.HighsModelStatus.kInfeasible:
            return Answer(None, math.inf, proven=True)
        proven = status == highspy.HighsModelStatus.kOptimal
        bound = max(info.mip_dual_bound * unit, 0.0)
        if not proven and not math.isfinite(info.objective_function_value):
            return Answer(None, bound, proven=False)
        values = solver.getSolution().col_value[: self._forced.start]
        chosen = tuple(number for number, value in enumerate(values) if value > 0.5)
        return Answer(chosen, bound, proven)


class _Program:
    """Rows and bounds for the solver. `minimised`: a column, None for the options' time."""

    def __init__(self, model: Linear, rows: Sequence[Row]) -> None:
        self.rows = [*rows]
        self.upper = [1.0] * model.first_level + [math.inf] * len(model.tops)
        self.minimised: int | None = None
        self._options = model.options
        self._forced = model.forced

    def of(self, highspy: Any, costs: Sequence[float]) -> Any:
        """As the solver takes it."""
        import numpy

        program = highspy.HighsLp()
        columns = len(self.upper)
        cost = numpy.zeros(columns)
        cost[: len(costs)] = costs
        if self.minimised is not None:
            cost[self.minimised] = 1.0
        program.num_col_, program.num_row_ = columns, len(self.rows)
        lower = numpy.zeros(columns)
        lower[self._options - self._forced : self._options] = 1.0
        program.col_cost_, program.col_lower_ = cost, lower
        program.col_upper_ = numpy.array(self.upper)
        program.row_lower_ = numpy.array([row.least for row in self.rows])
        program.row_upper_ = numpy.array([row.most for row in self.rows])
        terms = [term for row in self.rows for term in row.terms]
        matrix = program.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_ = numpy.cumsum([0, *(len(row.terms) for row in self.rows)])
        matrix.index_ = numpy.array([column for column, _ in terms])
        matrix.value_ = numpy.array([factor for _, factor in terms], dtype=float)
        kind = highspy.HighsVarType
        program.integrality_ = [kind.kInteger] * self._options + [kind.kContinuous] * (
            columns - self._options
        )
        return program


def _under(most: float, top: Top, unit: float) -> Row:
    """The row that keeps a highest moment under a limit."""
    changes = ((option, size / unit) for option, size in top.changes)
    return Row(-math.inf, most, ((top.level, 1.0), *changes))


def _scaled(row: Row, first_level: int, unit: float) -> Row:
    """A row of bytes in units, so that its factors are near those of the others."""
    if row.terms[0][0] < first_level:
        return row
    terms = tuple(
        (column, factor if column >= first_level else factor / unit) for column, factor in row.terms
    )
    return Row(row.least / unit, row.most / unit, terms)


def _started(start: Chosen, count: int) -> tuple[numpy.ndarray[Any, Any], numpy.ndarray[Any, Any]]:
    import numpy

    values = numpy.zeros(count)
    values[list(start)] = 1.0
    return numpy.arange(count, dtype=numpy.int32), values
