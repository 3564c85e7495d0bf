"""A problem as linear constraints, which say to the byte what the simulator does where options are on or off.

Three kinds of columns: each option, 1 where it is on; each part of a tensor's life that options decide on,
1 where it is alive then; and the bytes going into each stretch of tasks, which a row ties to the stretch
before. So the budget is in the bounds of columns alone, and a row has few terms however long a tensor lives.
To keep or to run again was put so by Jain et al., "Checkmate" (2020), one binary an operator and stage.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from torchtrim.planner.problem import Problem
from torchtrim.step.simulate import level, timeline
from torchtrim.step.step import DEVICE, Tensor
from torchtrim.step.ties import Tie, ends_at, starts_of, ties_of


class Row(NamedTuple):
    """`least <= the sum of factor * column <= most`."""

    least: float
    most: float
    terms: tuple[tuple[int, float], ...]


class Top(NamedTuple):
    """The highest moment of a stretch: `bytes` over column `level`, and more or less with some options on."""

    level: int
    bytes: int
    changes: tuple[tuple[int, int], ...]


class Insert(NamedTuple):
    """While an option's inserted work runs, memory is `bytes` over column `level`."""

    level: int
    option: int
    bytes: int


class Linear(NamedTuple):
    """The constraints. Columns: `options`, of which the last `forced` are on, then lives, then the bytes of
    each stretch, from `first_level` on.

    `tops`: the highest moments. `peak`: of the step as it is.
    """

    options: int
    forced: int
    first_level: int
    rows: tuple[Row, ...]
    tops: tuple[Top, ...]
    inserts: tuple[Insert, ...]
    peak: int


def linear(problem: Problem) -> Linear:
    """The constraints of a problem."""
    return _Builder(problem).build()


class _Builder:
    def __init__(self, problem: Problem) -> None:
        self._step, self._edits = problem.step, [*problem.edits, *problem.forced]
        self._forced = len(problem.forced)
        self._before, self._high = timeline(problem.step)
        self._starts = starts_of(self._step, self._edits)
        self._rows: list[Row] = []
        self._columns = len(self._edits)
        entering = [self._before[at] for at in self._starts]
        self._rise = [b - a for a, b in zip([0, *entering], [*entering, 0], strict=True)]
        self._changes: list[defaultdict[int, int]] = [defaultdict(int) for _ in self._rise]

    def build(self) -> Linear:
        """All rows; those of the levels last, when it is known what changes them."""
        for number, tie in ties_of(self._step, self._edits).items():
            self._add_lives(self._step.tensors[number], tie)
        for option, edit in enumerate(self._edits):
            for block in edit.blocks:
                if block.pool == DEVICE:
                    self._alive(option, block.first, block.last, block.bytes)
        self._add_clashes()
        first = self._columns
        self._add_levels(first)
        tops, inserts = tuple(self._tops(first)), tuple(self._inserts(first))
        peak = max(self._high, default=0)
        count = len(self._edits)
        return Linear(count, self._forced, first, tuple(self._rows), tops, inserts, peak)

    def _add_lives(self, tensor: Tensor, tie: Tie) -> None:
        """A column for each part of a tensor's life that options decide on, and when it is 1."""
        drops: defaultdict[int, list[int]] = defaultdict(list)
        for option, hold in tie.drops:
            drops[hold].append(option)
        sure = ends_at(tensor, set(drops), ())
        reasons: defaultdict[int, list[Row]] = defaultdict(list)
        for hold, options in drops.items():
            terms = tuple((option, 1.0) for option in options)
            reasons[tensor.holds[hold].until].append(Row(1.0, math.inf, terms))
        for option, until in tie.needs:
            reasons[until].append(Row(0.0, math.inf, ((option, -1.0),)))
        self._change(sure, tensor.death, -tensor.bytes)
        before, begin = -1, sure
        for end in sorted(until for until in reasons if until > sure):
            column = self._columns
            self._columns += 1
            if before >= 0:
                self._rows.append(Row(0.0, math.inf, ((before, 1.0), (column, -1.0))))
            for row in reasons[end]:
                self._rows.append(row._replace(terms=((column, 1.0), *row.terms)))
            self._alive(column, begin, end, tensor.bytes)
            before, begin = column, end

    def _change(self, first: int, last: int, size: int) -> None:
        """Bytes during `first <= task < last`, whatever is on."""
        begin, end = bisect_left(self._starts, first), bisect_left(self._starts, last)
        self._rise[begin] += size
        self._rise[end] -= size

    def _alive(self, column: int, first: int, last: int, size: int) -> None:
        """Bytes during `first <= task < last` where the column is 1."""
        begin, end = bisect_left(self._starts, first), bisect_left(self._starts, last)
        if begin < end:
            self._changes[begin][column] += size
            self._changes[end][column] -= size

    def _add_clashes(self) -> None:
        """Of options that claim the same task one is on at most."""
        spans = sorted(
            (span.first, span.last, option)
            for option, edit in enumerate(self._edits)
            for span in edit.claims
        )
        claimed: list[tuple[int, int]] = []
        cliques: dict[frozenset[int], None] = {}
        for first, last, option in spans:
            claimed = [(end, other) for end, other in claimed if end > first]
            claimed.append((last, option))
            cliques[frozenset(other for _, other in claimed)] = None
        for clique in cliques:
            if len(clique) > 1:
                self._rows.append(Row(-math.inf, 1.0, tuple((i, 1.0) for i in sorted(clique))))

    def _add_levels(self, first: int) -> None:
        for place in range(len(self._starts)):
            terms = [(first + place, 1.0)]
            if place:
                terms.append((first + place - 1, -1.0))
            changes = self._changes[place].items()
            terms += [(column, float(-size)) for column, size in changes if size]
            self._rows.append(Row(self._rise[place], self._rise[place], tuple(terms)))

    def _tops(self, first: int) -> Iterator[Top]:
        changes: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for option, edit in enumerate(self._edits):
            for rise in edit.rises:
                change = rise.bytes - self._step.tasks[rise.task].transient
                changes[rise.task].append((option, change))
        for place, (begin, end) in enumerate(pairwise([*self._starts, len(self._high)])):
            over = max(self._high[begin:end]) - self._before[begin]
            yield Top(first + place, over, tuple(changes[begin]))

    def _inserts(self, first: int) -> Sequence[Insert]:
        return [
            Insert(first + bisect_left(self._starts, insert.at), option, level(insert))
            for option, edit in enumerate(self._edits)
            for insert in edit.inserts
            if insert.at < len(self._high) and level(insert) > 0
        ]
