"""A problem as linear constraints, which agree to the byte with the simulator if every option is on or off.

There are two kinds of columns: one for each option, 1 if it is on, and one for each part of a tensor's life
that depends on options, 1 if the tensor is alive then. Memory at any moment is a sum over the columns, and
the budget bounds it at each moment; a solver starts with the few moments that matter. Jain et al.,
"Checkmate" (2020), formulated rematerialization this way, with one binary for each operator and stage.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from torchtrim.planner.problem import Problem, cliques
from torchtrim.step.incremental import TensorTie, starts_of, ties_of
from torchtrim.step.simulate import level, timeline
from torchtrim.step.step import DEVICE, Tensor

Terms = tuple[tuple[int, float], ...]  # Columns, each with its factor.


class Constraint(NamedTuple):
    """`least <= the sum of factor * column <= most`."""

    least: float
    most: float
    terms: Terms


class PeakMoment(NamedTuple):
    """Bytes above the level on entry to a stretch of tasks, plus the `terms` of columns that are 1."""

    stretch: int
    bytes: int
    terms: Terms


class Linear(NamedTuple):
    """The constraints. Columns: `options`, the last `forced` of them on, then lives; `columns` in all.

    `rises`: the change of bytes on entry to each stretch since the one before, if all columns are 0.
    `changes`: the additional change for each column at 1. `moments`: each stretch's highest, and inserts.
    """

    options: int
    forced: int
    columns: int
    rows: tuple[Constraint, ...]
    rises: tuple[int, ...]
    changes: tuple[Terms, ...]
    moments: tuple[PeakMoment, ...]

    def at(self, moment: PeakMoment) -> PeakMoment:
        """Return a moment with its total bytes and the factors of all columns that it depends on."""
        terms: defaultdict[int, float] = defaultdict(float)
        for column, size in moment.terms:
            terms[column] += size
        for changes in self.changes[: moment.stretch + 1]:
            for column, size in changes:
                terms[column] += size
        total = sum(self.rises[: moment.stretch + 1]) + moment.bytes
        kept = tuple((column, size) for column, size in terms.items() if size)
        return PeakMoment(moment.stretch, total, kept)


class LinearBuilder:
    """Builds the constraints of a problem."""

    def __init__(self, problem: Problem) -> None:
        self._step, self._edits = problem.step, [*problem.edits, *problem.forced]
        self._forced = len(problem.forced)
        self._before, self._high = timeline(problem.step)
        self._starts = starts_of(self._step, self._edits)
        self._rows: list[Constraint] = []
        self._columns = len(self._edits)
        entering = [self._before[at] for at in self._starts]
        self._rise = [b - a for a, b in zip([0, *entering], [*entering, 0], strict=True)]
        self._changes: list[defaultdict[int, int]] = [defaultdict(int) for _ in self._rise]

    def build(self) -> Linear:
        """Add lives and clashes, and then the moments, which depend on them."""
        for number, tie in ties_of(self._step, self._edits).items():
            self._add_lives(self._step.tensors[number], tie)
        for option, edit in enumerate(self._edits):
            for block in edit.blocks:
                if block.pool == DEVICE:
                    self._alive(option, block.first, block.last, block.bytes)
        for clique in cliques(self._edits):
            terms = tuple((option, 1.0) for option in sorted(clique))
            self._rows.append(Constraint(-math.inf, 1.0, terms))
        return Linear(
            options=len(self._edits),
            forced=self._forced,
            columns=self._columns,
            rows=tuple(self._rows),
            rises=tuple(self._rise[:-1]),
            changes=tuple(_terms(changes) for changes in self._changes[:-1]),
            moments=(*self._tops(), *self._inserts()),
        )

    def _add_lives(self, tensor: Tensor, tie: TensorTie) -> None:
        """Add a column for each part of a tensor's life that depends on options, and its constraints."""
        drops: defaultdict[int, list[int]] = defaultdict(list)
        for option, hold in tie.drops:
            drops[hold].append(option)
        sure = tensor.end(drops)
        reasons: defaultdict[int, list[Constraint]] = defaultdict(list)
        for hold, options in drops.items():
            terms = tuple(
                (option, 1.0) for option in dict.fromkeys(options)
            )  # one may drop it twice
            reasons[tensor.holds[hold].until].append(Constraint(1.0, math.inf, terms))
        for option, until in tie.needs:
            reasons[until].append(Constraint(0.0, math.inf, ((option, -1.0),)))
        self._rise[bisect_left(self._starts, sure)] -= tensor.bytes
        self._rise[bisect_left(self._starts, tensor.death)] += tensor.bytes
        before, begin = -1, sure
        for end in sorted(until for until in reasons if until > sure):
            column = self._columns
            self._columns += 1
            if before >= 0:
                self._rows.append(Constraint(0.0, math.inf, ((before, 1.0), (column, -1.0))))
            for row in reasons[end]:
                self._rows.append(row._replace(terms=((column, 1.0), *row.terms)))
            self._alive(column, begin, end, tensor.bytes)
            before, begin = column, end

    def _alive(self, column: int, first: int, last: int, size: int) -> None:
        begin, end = bisect_left(self._starts, first), bisect_left(self._starts, last)
        if begin < end:
            self._changes[begin][column] += size
            self._changes[end][column] -= size

    def _tops(self) -> Iterator[PeakMoment]:
        changes: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for option, edit in enumerate(self._edits):
            for rise in edit.rises:
                changes[rise.task][option] = rise.bytes - self._step.tasks[rise.task].transient
        for place, (begin, end) in enumerate(pairwise([*self._starts, len(self._high)])):
            over = max(self._high[begin:end]) - self._before[begin]
            yield PeakMoment(place, over, _terms(changes[begin]))

    def _inserts(self) -> Iterator[PeakMoment]:
        for option, edit in enumerate(self._edits):
            for insert in edit.inserts:
                if insert.at < len(self._high) and level(insert) > 0:
                    place = bisect_left(self._starts, insert.at)
                    yield PeakMoment(place, 0, ((option, level(insert)),))


def _terms(changes: dict[int, int]) -> Terms:
    return tuple((column, float(size)) for column, size in changes.items() if size)
