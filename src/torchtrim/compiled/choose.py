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
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from torchtrim.compiled.joint import BYTES, Joint, Kernel
from torchtrim.compiled.memory import Event, Simulated, in_order
from torchtrim.planner.linear import Constraint
from torchtrim.planner.solvers.integer import Effort, IntegerProgram, solve

_SEGMENTS = 16
"""In a second of search at 60 % of a ResNet's peak, 12 or 16 compute 9 % again, 8 12 %, and 24 45 %."""
_FEW = 8
"""Arbitrary; nodes of a small graph's segment."""
_UNIT = 2**20
_UNITS = 1e3
"""Of the objective, for the seconds of all of forward: a solver's tolerances are absolute."""
_TIDY = 1e-3
"""Of a second for a second of writing: among equal choices the one that saves less."""
_NEAR = 1e-2
"""Of the seconds of all of forward: an answer this near the bound is not worth a longer search."""
_SMALL = 2e-3
"""Arbitrary; share of the budget: the search leaves smaller values as they are."""
_LOOK = 2e-6
"""About the seconds of one core, for each value that can be saved, to look at one other choice."""
_FREE = 1e-6
"""Arbitrary; share of forward's seconds: less is as good as free."""
Saved = Mapping[str, frozenset[int]]
"""The saved values of each graph, by the graph's key."""


class SavingProgram:
    """The integer program of a step's calls. Calls of a graph share its choice.

    `temporary`: the bytes of each graph's forward over those it saves. `events`: the order of the calls and
    their backwards, by default all calls and then the backwards in reverse. `keeps`: nothing in
    `Joint.together` is computed again.
    """

    def __init__(
        self, calls: Sequence[Joint], temporary: Mapping[str, int], events: Sequence[Event] = ()
    ) -> None:
        self._calls = calls
        self._events = in_order(len(calls), events)
        self._at = {event: at for at, event in enumerate(self._events)}
        self._temporary = temporary
        self.keeps = False
        self._times = Counter(joint.key for joint in calls)
        self._graphs = {joint.key: _Graph(joint) for joint in calls}
        self._saved: dict[tuple[str, int], int] = {}
        self._begun: dict[tuple[str, int, int], int] = {}
        self._again: dict[tuple[str, int, int], int] = {}
        self._costs: list[float] = []
        self._upper: list[float] = []
        self.whole = sum(value.seconds for joint in calls for value in joint.values)
        self._add_columns()
        together = {
            column
            for (key, number, _), column in (self._begun | self._again).items()
            if number in self._graphs[key].joint.together
        }
        self._upper_kept = [
            0.0 if column in together else most for column, most in enumerate(self._upper)
        ]
        self._rows = [row for key in self._graphs for row in self._order(key)]
        self._memory = self._add_memory()
        self._fixed = numpy.array([fixed for fixed, _ in self._memory])
        self._bytes = numpy.zeros((len(self._costs), len(self._memory)))
        for moment, (_, terms) in enumerate(self._memory):
            for column, factor in terms:
                self._bytes[column, moment] = factor * _UNIT

    def choose(self, budget: int, seconds: float) -> Saved | None:
        """Return what to save within a budget, or None if an effort of some seconds finds nothing.

        Where the program is not solved in time, what is computed again may begin in fractions. They hide
        bytes, up to a sixth of a ResNet's.
        """
        return self._solve(budget, seconds, whole=True) or self._solve(budget, seconds, whole=False)

    def improved(self, saved: Saved, budget: int, seconds: float) -> Saved:
        """Return a choice that an effort of some seconds brings nearer to the budget, or makes quicker."""
        return _Search(self, budget).run(saved, Effort(seconds))

    def _solve(self, budget: int, seconds: float, *, whole: bool) -> Saved | None:
        bounds = [
            Constraint(-math.inf, (budget - fixed) / _UNIT, terms)
            for fixed, (_, terms) in zip(self._fixed, self._memory, strict=True)
        ]
        program = IntegerProgram(
            lower=[0.0] * len(self._costs),
            upper=self._upper_kept if self.keeps else self._upper,
            costs=self._costs,
            integers=len(self._saved) + (len(self._begun) if whole else 0),
            rows=[*self._rows, *bounds],
            near=_NEAR * _UNITS,
        )
        answer = solve(program, Effort(seconds), enough=seconds / 4)
        if answer.values is None:
            return None
        found: defaultdict[str, set[int]] = defaultdict(set, {key: set() for key in self._graphs})
        for (key, value), column in self._saved.items():
            if answer.values[column] > 0.5:
                found[key].add(value)
        return {key: frozenset(each) for key, each in found.items()}

    def correct(self, saved: Saved, run: Simulated) -> None:
        """Correct the model by the bytes that the code of a choice needs at each moment.

        The joint graph knows nothing of fusion. Kernels of libraries are in both, and tell where a level of
        the run belongs.
        """
        levels = self.state(saved).levels.tolist()
        seen = self._seen(run.kernels) or {levels.index(max(levels)): run.peak_bytes}
        moments, off = sorted(seen), []
        for moment, level in enumerate(levels[:-1]):
            next_one = moments[min(bisect_left(moments, moment), len(moments) - 1)]
            high = seen[next_one]
            off.append(min(high - levels[next_one], high - level))
        self._fixed = self._fixed + numpy.array([*off, run.forward_peak - levels[-1]])

    def _seen(self, run: Sequence[Kernel]) -> dict[int, int]:
        """Return the highest level of the run at each moment of a library kernel that both have."""
        kernels, begins = [], [0]
        for joint in self._calls:
            begins.append(begins[-1] + self._graphs[joint.key].segments + 1)
        for number in (one.call for one in self._events if one.backward):
            joint = self._calls[number]
            segment = self._graphs[joint.key].segment
            kernels += [(name, begins[number] + segment(at)) for name, at in joint.kernels]
        found: defaultdict[int, int] = defaultdict(int)
        begin = 0
        for at, moment in sorted(_same(run, kernels)):
            found[moment] = max(found[moment], *(level for _, level in run[begin : at + 1]))
            begin = at + 1
        return found

    def seconds(self, saved: Saved) -> float:
        """Return the seconds of computing again what backward needs and a choice does not save."""
        return self.state(saved).seconds

    def state(self, saved: Saved) -> State:
        """Return what a choice needs in this model."""
        columns = [self._saved[key, value] for key, values in saved.items() for value in values]
        seconds, forbidden = 0.0, 0
        for key, graph in self._graphs.items():
            for number, needed in graph.again(saved[key]).items():
                value = graph.joint.values[number]
                columns += [self._again[key, number, segment] for segment in needed]
                kept = self.keeps and number in graph.joint.together
                forbidden += kept or not value.can_redo
                seconds += value.seconds * self._times[key] * (1 if value.stays else len(needed))
        return State(self._fixed + self._bytes[columns].sum(0), seconds, forbidden)

    def choices(self, least: int) -> list[tuple[str, int]]:
        """Return the values of some bytes that can be saved."""
        return [
            (key, number)
            for key, graph in self._graphs.items()
            for number, value in enumerate(graph.joint.values)
            if value.can_save and value.bytes >= least
        ]

    def _add_columns(self) -> None:
        """The saved values first, then what begins: those may have to be whole."""
        for key, graph in self._graphs.items():
            for number, value in enumerate(graph.joint.values):
                write = value.bytes / BYTES * (_TIDY if value.stays else 1.0)
                self._saved[key, number] = self._column(write * self._times[key], value.can_save)
        for key, graph in self._graphs.items():
            for number, value in enumerate(graph.joint.values):
                cost = value.seconds * self._times[key]
                for segment in graph.begins[number] if value.stays else ():
                    self._begun[key, number, segment] = self._column(cost, value.can_redo)
        for key, graph in self._graphs.items():
            for number, value in enumerate(graph.joint.values):
                cost = 0.0 if value.stays else value.seconds * self._times[key]
                for segment in graph.lives[number]:
                    self._again[key, number, segment] = self._column(cost, value.can_redo)

    def _column(self, cost: float, allowed: bool) -> int:
        self._costs.append(cost / (self.whole or 1.0) * _UNITS)
        self._upper.append(float(allowed))
        return len(self._costs) - 1

    def _order(self, key: str) -> Iterator[Constraint]:
        """A value that is read must be in memory; one computed again needs its parents when that begins."""
        graph = self._graphs[key]

        def there(number: int, segment: int, column: int | None = None) -> Constraint:
            terms = (self._saved[key, number], 1.0), (self._again[key, number, segment], 1.0)
            return (
                _at_least(*terms, (column, -1.0))
                if column is not None
                else Constraint(1.0, math.inf, terms)
            )

        for number, value in enumerate(graph.joint.values):
            again = {at: self._again[key, number, at] for at in graph.lives[number]}
            begun = {at: self._begun[key, number, at] for at in graph.begins[number] if value.stays}
            for segment, column in (begun if value.stays else again).items():
                yield from (there(parent, segment, column) for parent in value.parents)
            yield from (there(number, segment) for segment in graph.direct[number])
            if value.stays:
                yield Constraint(-math.inf, 1.0, tuple((one, 1.0) for one in begun.values()))
                for segment, column in again.items():
                    before = (one.get(at) for one, at in ((again, segment - 1), (begun, segment)))
                    known = ((one, 1.0) for one in before if one is not None)
                    yield _at_least(*known, (column, -1.0))

    def _add_memory(self) -> list[tuple[int, tuple[tuple[int, float], ...]]]:
        """The bytes of each segment of each backward, and of the end of each forward."""
        found = []
        for call, joint in enumerate(self._calls):
            graph = self._graphs[joint.key]
            others = self._held(Event(call, True))
            for segment in range(graph.segments):
                terms = defaultdict(float, others)
                for number in range(len(joint.values)):
                    self._add_life(graph, number, segment, terms)
                found.append((graph.gradients[segment], tuple(terms.items())))
            held = self._held(Event(call))
            found.append((self._temporary[joint.key], tuple(held.items())))
        return found

    def _held(self, event: Event) -> dict[int, float]:
        """Return the saved values of the calls whose backwards come after an event."""
        found: defaultdict[int, float] = defaultdict(float)
        for call, joint in enumerate(self._calls):
            if self._at[Event(call)] <= self._at[event] < self._at[Event(call, True)]:
                for number, value in enumerate(joint.values):
                    found[self._saved[joint.key, number]] += value.bytes / _UNIT
        return found

    def _add_life(
        self, graph: _Graph, number: int, segment: int, terms: defaultdict[int, float]
    ) -> None:
        value, key = graph.joint.values[number], graph.joint.key
        if segment >= graph.lives[number].stop or not value.bytes:
            return
        terms[self._saved[key, number]] += value.bytes / _UNIT
        again = self._again.get((key, number, segment))
        if value.stays and again is not None:
            terms[again] += value.bytes / _UNIT


class State(NamedTuple):
    """The bytes of a choice at each moment, and the seconds and forbidden values computed again."""

    levels: Any
    seconds: float
    forbidden: int


class _Search:
    """Local search for a choice within a budget: save or drop one value at a time."""

    def __init__(self, program: SavingProgram, budget: int) -> None:
        self._program = program
        self._budget = budget
        self._values = program.choices(int(_SMALL * budget))
        self._round = _LOOK * len(program.choices(0)) * len(self._values)

    def run(self, start: Saved, effort: Effort) -> Saved:
        """Return a choice that no such value brings nearer to the budget, or makes quicker within it.

        The search ends with what it has when the effort is spent.
        """
        saved, state = start, self._program.state(start)
        while effort.left > 0 and (found := self._better(saved, state)) is not None:
            saved, state = found
            effort.spend(self._round)
        return saved

    def _better(self, saved: Saved, state: State) -> tuple[Saved, State] | None:
        """Return a choice of fewest bytes over the budget for a second, or within it of the least time."""
        over, best, found = self._over(state), 0.0, None
        free = _FREE * self._program.whole
        for key, value in self._values:
            other = {**saved, key: saved[key] ^ {value}}
            new = self._program.state(other)
            added, fallen = new.seconds - state.seconds, over - self._over(new)
            gain = fallen / max(added, free) if over else -added - free
            if new.forbidden <= state.forbidden and fallen >= 0 and gain > best:
                best, found = gain, (other, new)
        return found

    def _over(self, state: State) -> float:
        return float(numpy.maximum(state.levels - self._budget, 0.0).sum())


def _at_least(*terms: tuple[int, float]) -> Constraint:
    return Constraint(0.0, math.inf, terms)


class _Graph:
    """A joint graph in segments.

    `direct`: the segments in which backward reads a value, or holds it to read it. `lives`: those in which
    it can be needed, and `begins` those in which it can be computed again.
    """

    def __init__(self, joint: Joint) -> None:
        self.joint = joint
        self.segments = min(_SEGMENTS, len(joint.work) // _FEW) or 1
        total = joint.work[-1] if joint.work else 0.0
        self._ends = [total * (at + 1) / self.segments for at in range(self.segments)]
        of = [self.segment(position) for position in range(len(joint.work))]
        self.gradients = [0] * self.segments
        for position, level in enumerate(joint.gradients):
            self.gradients[of[position]] = max(self.gradients[of[position]], level)
        self.direct = [_held([of[at] for at in one.uses], one.stays) for one in joint.values]
        first = [min(each, default=self.segments - 1) for each in self.direct]
        begin = [min(each, default=0) for each in self.direct]
        last = [max(each, default=0) for each in self.direct]
        for number in reversed(range(len(joint.values))):
            value = joint.values[number]
            latest = begin[number] if value.stays else last[number]
            for parent in value.parents:
                first[parent] = min(first[parent], first[number])
                last[parent] = max(last[parent], latest)
                if not self.direct[parent]:
                    begin[parent] = max(begin[parent], latest)
        self.lives = [range(a, b + 1) for a, b in zip(first, last, strict=True)]
        self.begins = [range(a, b + 1) for a, b in zip(first, begin, strict=True)]

    def segment(self, position: int) -> int:
        """Return the segment of a position in backward."""
        return min(bisect_left(self._ends, self.joint.work[position]), self.segments - 1)

    def again(self, saved: frozenset[int]) -> dict[int, list[int]]:
        """Return the values computed again with a choice, and the segments that need them."""
        needed = [{*each} for each in self.direct]
        found: dict[int, list[int]] = {}
        for number in reversed(range(len(self.joint.values))):
            if number in saved or not needed[number]:
                continue
            value = self.joint.values[number]
            found[number] = _held(needed[number], value.stays)
            for parent in value.parents:
                needed[parent].update(found[number][:1] if value.stays else found[number])
        return found


def _same(one: Sequence[Kernel], other: Sequence[Kernel]) -> Iterator[tuple[int, int]]:
    """Yield a place in one, and the other's number there: kernels of a name in order, if as many."""
    at = _by_name((name, place) for place, (name, _) in enumerate(one))
    numbers = _by_name(other)
    for name in at:
        if len(at[name]) == len(numbers[name]):
            yield from zip(at[name], numbers[name], strict=True)


def _by_name(kernels: Iterable[Kernel]) -> defaultdict[str, list[int]]:
    found: defaultdict[str, list[int]] = defaultdict(list)
    for name, number in kernels:
        found[name].append(number)
    return found


def _held(segments: Collection[int], stays: bool) -> list[int]:
    """Return the segments of reads, and those in between if memory holds the value."""
    if stays and segments:
        return [*range(min(segments), max(segments) + 1)]
    return sorted({*segments})
