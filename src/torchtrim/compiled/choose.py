"""The choice of what compiled graphs save: the least seconds of computing again, within a peak.

Backward is cut into segments of about equal time. A value is saved, or computed again from some segment on,
and stays until its last use. The bytes at each segment are those of saved values that are still to be read,
of values computed again, and of gradients; together they are an integer program. Jain et al., "Checkmate"
(2020), formulated rematerialization this way; here each value is computed again at most once, as in the
graph that torch then extracts.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torchtrim.compiled.joint import BYTES, Joint
from torchtrim.planner.linear import Constraint
from torchtrim.planner.solvers.integer import IntegerProgram, solve

_SEGMENTS = 24
"""Enough that a segment is less than a block of usual models; more makes the program slower to solve."""
_UNIT = 2**20
_UNITS = 1e3
"""Of the objective, for the seconds of all of forward: a solver's tolerances are absolute."""
_TIDY = 1e-3
"""Of a second for a second of writing: among equal choices the one that saves less."""
_NEAR = 2e-3
"""Of the seconds of all of forward: an answer this near the bound is not worth a longer search."""
Saved = Mapping[str, frozenset[int]]
"""The saved values of each graph, by the graph's key."""


class Limits(NamedTuple):
    """What is known of each call beside the choice.

    `scale`: of the gradients' bytes, which are counted before Inductor fuses. `temporary`: the bytes of
    forward over those it saves.
    """

    scale: float = 1.0
    temporary: int = 0


class SavingProgram:
    """The integer program of a step's calls, in order. Calls of a graph share its choice."""

    def __init__(self, calls: Sequence[Joint], limits: Mapping[str, Limits]) -> None:
        self._calls = calls
        self._limits = limits
        self._graphs = {joint.key: _Graph(joint) for joint in calls}
        self._saved: dict[tuple[str, int], int] = {}
        self._again: dict[tuple[str, int, int], int] = {}
        self._costs: list[float] = []
        self._upper: list[float] = []
        self._whole = sum(value.seconds for joint in calls for value in joint.values)
        self._add_columns()
        self._rows = [row for key in self._graphs for row in self._order(key)]
        self._memory = self._add_memory()

    def choose(self, budget: int, seconds: float) -> Saved | None:
        """Return what to save within a budget, or None if nothing fits."""
        bounds = [
            Constraint(-math.inf, (budget - fixed) / _UNIT, terms) for fixed, terms in self._memory
        ]
        program = IntegerProgram(
            lower=[0.0] * len(self._costs),
            upper=self._upper,
            costs=self._costs,
            integers=len(self._saved),
            rows=[*self._rows, *bounds],
            near=_NEAR * _UNITS,
        )
        answer = solve(program, seconds, enough=seconds / 4)
        if answer.values is None:
            return None
        found: defaultdict[str, set[int]] = defaultdict(set, {key: set() for key in self._graphs})
        for (key, value), column in self._saved.items():
            if answer.values[column] > 0.5:
                found[key].add(value)
        return {key: frozenset(each) for key, each in found.items()}

    def peak(self, saved: Saved) -> int:
        """Return the highest bytes of a choice in this model of memory."""
        on = self._values(saved)
        return max(
            int(fixed + _UNIT * sum(factor * on.get(column, 0) for column, factor in terms))
            for fixed, terms in self._memory
        )

    def seconds(self, saved: Saved) -> float:
        """Return the seconds of computing again what backward needs and a choice does not save."""
        return sum(
            graph.joint.values[number].seconds
            for joint in self._calls
            for graph in (self._graphs[joint.key],)
            for number in graph.begins(saved[joint.key])
        )

    def _values(self, saved: Saved) -> dict[int, int]:
        on = {
            self._saved[key, value]: 1
            for key, values in saved.items()
            for value in values
            if (key, value) in self._saved
        }
        for key, graph in self._graphs.items():
            for value, begin in graph.begins(saved[key]).items():
                for segment in graph.lives[value]:
                    if segment >= begin:
                        on[self._again[key, value, segment]] = 1
        return on

    def _add_columns(self) -> None:
        times: defaultdict[str, int] = defaultdict(int)
        for joint in self._calls:
            times[joint.key] += 1
        for key, graph in self._graphs.items():
            for number, value in enumerate(graph.joint.values):
                write = value.bytes / BYTES * (_TIDY if value.stays else 1.0)
                self._saved[key, number] = self._column(write * times[key], value.can_save)
        for key, graph in self._graphs.items():
            for number, value in enumerate(graph.joint.values):
                for segment in graph.lives[number]:
                    last = segment == graph.lives[number][-1]
                    cost = value.seconds * times[key] if last else 0.0
                    self._again[key, number, segment] = self._column(cost, value.can_redo)

    def _column(self, cost: float, allowed: bool) -> int:
        self._costs.append(cost / (self._whole or 1.0) * _UNITS)
        self._upper.append(float(allowed))
        return len(self._costs) - 1

    def _order(self, key: str) -> list[Constraint]:
        """What is read must be there, and what is computed again needs its parents."""
        graph, rows = self._graphs[key], []

        def there(number: int, segment: int) -> tuple[tuple[int, float], ...]:
            again = self._again[key, number, min(segment, graph.lives[number][-1])]
            return (self._saved[key, number], 1.0), (again, 1.0)

        for number, value in enumerate(graph.joint.values):
            for segment in graph.lives[number]:
                column = self._again[key, number, segment]
                if segment > graph.lives[number][0]:
                    before = self._again[key, number, segment - 1]
                    rows.append(Constraint(0.0, math.inf, ((column, 1.0), (before, -1.0))))
                for parent in value.parents:
                    terms = (*there(parent, segment), (column, -1.0))
                    rows.append(Constraint(0.0, math.inf, terms))
            if value.uses is not None:
                rows.append(Constraint(1.0, math.inf, there(number, graph.used[number])))
        return rows

    def _add_memory(self) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
        """The bytes of each segment of each backward, and of the end of each forward."""
        found = []
        before: defaultdict[int, float] = defaultdict(float)
        for joint in self._calls:
            graph, limits = self._graphs[joint.key], self._limits.get(joint.key, Limits())
            for segment in range(graph.segments):
                terms = defaultdict(float, before)
                for number in range(len(joint.values)):
                    self._add_life(graph, number, segment, terms)
                fixed = graph.gradients[segment] * limits.scale
                found.append((fixed, tuple(terms.items())))
            for number, value in enumerate(joint.values):
                before[self._saved[joint.key, number]] += value.bytes / _UNIT
            found.append((float(limits.temporary), tuple(before.items())))
        return found

    def _add_life(
        self, graph: _Graph, number: int, segment: int, terms: defaultdict[int, float]
    ) -> None:
        value, key = graph.joint.values[number], graph.joint.key
        if segment > graph.lives[number][-1] or not value.bytes:
            return
        terms[self._saved[key, number]] += value.bytes / _UNIT
        again = self._again.get((key, number, segment))
        if value.stays and again is not None:
            terms[again] += value.bytes / _UNIT


class _Graph:
    """A joint graph in segments: those in which each value can be needed, and is first `used`."""

    def __init__(self, joint: Joint) -> None:
        self.joint = joint
        self.segments = min(_SEGMENTS, len(joint.work)) or 1
        total = joint.work[-1] if joint.work else 0.0
        self._ends = [total * (at + 1) / self.segments for at in range(self.segments)]
        of = [self._segment(position) for position in range(len(joint.work))]
        self.gradients = [0] * self.segments
        for position, level in enumerate(joint.gradients):
            self.gradients[of[position]] = max(self.gradients[of[position]], level)
        self.used = [of[one.uses[0]] if one.uses else self.segments - 1 for one in joint.values]
        first = [*self.used]
        last = [of[one.uses[1]] if one.uses else 0 for one in joint.values]
        for number in reversed(range(len(joint.values))):
            value = joint.values[number]
            end = first[number] if value.stays else last[number]
            for parent in value.parents:
                first[parent] = min(first[parent], first[number])
                last[parent] = max(last[parent], end)
        self.lives = [range(a, max(a, b) + 1) for a, b in zip(first, last, strict=True)]

    def _segment(self, position: int) -> int:
        return min(bisect_left(self._ends, self.joint.work[position]), self.segments - 1)

    def begins(self, saved: frozenset[int]) -> dict[int, int]:
        """Return the values computed again with a choice, and the segment in which each is first needed."""
        begins: dict[int, int] = {}
        for number in reversed(range(len(self.joint.values))):
            value = self.joint.values[number]
            if number in saved:
                continue
            if value.uses is not None:
                begins[number] = min(begins.get(number, self.segments), self.used[number])
            if number in begins:
                for parent in value.parents:
                    begins[parent] = min(begins.get(parent, self.segments), begins[number])
        return {number: begin for number, begin in begins.items() if number not in saved}
