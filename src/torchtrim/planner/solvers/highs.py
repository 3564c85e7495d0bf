"""An integer program for HiGHS (Huangfu and Hall, "Parallelizing the dual revised simplex method", 2018).

It is there with `pip install torchtrim[solver]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

from torchtrim.core.run_queue import now
from torchtrim.planner.linear import Row

_GAP = 1e-6
_PATIENCE = 4.0
"""How many times its seconds a solver may take by the wall, on a machine that does other work too."""


@dataclass(frozen=True)
class Program:
    """Columns between `lower` and `upper`, the first `integers` of them whole, of which `costs` is minimised.

    `near`: how far over the bound an answer may be where the best takes long.
    """

    lower: Sequence[float]
    upper: Sequence[float]
    costs: Sequence[float]
    integers: int
    rows: Sequence[Row]
    near: float = 0.0


class Solved(NamedTuple):
    """`values` of the columns, None where none were found, and what no others are below.

    `infeasible`: there are none. `proven`: there are none better, apart from rounding.
    """

    values: Any
    bound: float
    infeasible: bool
    proven: bool


def solve(
    program: Program, seconds: float, start: Sequence[int] | None = None, enough: float = 0.0
) -> Solved:
    """Solve it within some seconds, from the whole columns that are 1 in a `start`.

    The best is looked for during `enough` seconds even where what is found is near it.
    """
    import highspy

    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, value in (
        ("output_flag", False),
        ("random_seed", 0),
        ("threads", 1),
        ("time_limit", _PATIENCE * seconds if program.integers else seconds),
        ("mip_rel_gap", _GAP),
        ("mip_abs_gap", _GAP),
    ):
        solver.setOptionValue(name, value)
    solver.passModel(_model(highspy, program))
    if start is not None and program.integers:
        values = numpy.zeros(program.integers)
        values[list(start)] = 1.0
        numbers = numpy.arange(program.integers, dtype=numpy.int32)
        solver.setSolution(program.integers, numbers, values)
    if program.integers:
        solver.cbMipInterrupt += _stops(program.near, now() + enough, now() + seconds)
    if not _runs(highspy, solver):
        return Solved(None, -math.inf, infeasible=False, proven=False)
    return _solved(highspy, solver, whole=bool(program.integers))


def _runs(highspy: Any, solver: Any) -> bool:
    """Run it, once more with new threads where that fails, as after a run of the user's with others."""
    if solver.run() != highspy.HighsStatus.kError:
        return True
    highspy.Highs.resetGlobalScheduler(True)
    return bool(solver.run() != highspy.HighsStatus.kError)


def _stops(near: float, enough: float, until: float) -> Any:
    """What has the solver stop when its time is over, or it is near enough and has looked for a while."""

    def look(event: Any) -> None:
        found, clock = event.data_out, now()
        is_near = found.mip_primal_bound - found.mip_dual_bound <= near
        event.data_in.user_interrupt = clock > until or (clock > enough and is_near)

    return look


def _solved(highspy: Any, solver: Any, *, whole: bool) -> Solved:
    status, info = solver.getModelStatus(), solver.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        return Solved(None, math.inf, infeasible=True, proven=True)
    proven = status == highspy.HighsModelStatus.kOptimal
    found = info.objective_function_value
    values = numpy.array(solver.getSolution().col_value)
    if not whole:
        return Solved(values if proven else None, found if proven else 0.0, False, proven)
    known = proven or math.isfinite(found)
    return Solved(values if known else None, info.mip_dual_bound, False, proven)


def _model(highspy: Any, program: Program) -> Any:
    """The program as the solver takes it."""
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
