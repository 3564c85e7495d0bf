"""A plan of compiled graphs: chosen on joint graphs, and checked in the code of Inductor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from torchtrim.compiled.choose import Saved, SavingProgram
from torchtrim.compiled.graphs import Graphs
from torchtrim.compiled.joint import Joint
from torchtrim.compiled.memory import GraphCall, Simulated, memory_of
from torchtrim.compiled.phases import above
from torchtrim.records.plan import CompiledGraph

_ROUNDS = 4
"""Dry compiles: each costs a third of an ordinary compile, and the bias is mostly constant."""
_NEAR = 0.97
"""Of the budget: a peak above it is near enough; to come nearer costs a dry compile and saves little time."""
_AIM = 0.985
"""Share of the budget to aim at: the middle of what is near enough."""
_SECONDS = 5.0
"""Arbitrary; an effort, for the solver and for the search, each time."""
_HIGHER = (1.1, 1.21, 1.33)
"""Arbitrary; times the aim, where the model has no choice for it: it counts up to a quarter too much."""
_FREE = 5e-3
"""Of forward's seconds: a choice that adds less is not looked for again nearer to the budget."""


class SavingChoice(NamedTuple):
    """What is saved, the simulated memory of the step, and the added seconds by the model of costs.

    `first_peak`: the peak of the first choice, before the model was corrected. `rounds`: choices
    tried. `graphs`: the choice as a plan writes it, empty for torch's own.
    """

    saved: Saved
    simulated: Simulated
    added_seconds: float
    first_peak: int
    rounds: int = 0
    graphs: tuple[CompiledGraph, ...] = ()


class GraphPlanner:
    """Planner of a watched program's last step.

    `alone`: the bytes that each graph saves, and its peak. `measured`: the peak of each phase of the step as
    torch compiles it, to which all figures then refer: eager code runs in between.
    """

    def __init__(self, graphs: Graphs, measured: Mapping[str, int] = {}) -> None:
        self._graphs = graphs
        self.own = graphs.memory()
        self._above = above(measured, self.own.phases)
        if self._above:
            self.own = graphs.memory(above=self._above)
        alone = {
            graph.joint.key: memory_of([GraphCall(graph.pair())], graphs.rises)
            for graph in graphs.graphs
            if graph.joint is not None
        }
        self.alone = tuple((one.saved_bytes, one.peak_bytes) for one in alone.values())
        self._temporary = {key: one.forward_peak - one.saved_bytes for key, one in alone.items()}
        self._as_is = self._planner_of(graphs.joints, self.own)

    @property
    def lowest(self) -> SavingChoice:
        """The tried choice with the smallest peak."""
        every = (self._as_is, self._edited)
        return min((one.lowest for one in every if one is not None), key=_peak)

    def plan(self, budget: int) -> SavingChoice | None:
        """Return a choice of little added time whose simulated peak is within a budget, or None.

        The graphs are edited to free memory sooner if they do not fit otherwise, or if that alone is enough.
        """
        found = self._as_is.plan(budget)
        if found is not None and found.added_seconds <= self._as_is.free:
            return found
        edited = self._edited
        if edited is not None and (found is None or _peak(edited.first) <= budget):
            return edited.plan(budget)
        return found

    def added_seconds(self, saved: Saved) -> float:
        """Return the seconds of computing again that a choice for the graphs as they are adds."""
        return self._as_is.added_seconds(saved)

    @cached_property
    def _edited(self) -> _JointPlanner | None:
        joints = self._graphs.edited
        return self._planner_of(joints) if joints != self._graphs.joints else None

    def _planner_of(self, joints: Sequence[Joint], own: Simulated | None = None) -> _JointPlanner:
        same = zip(self._graphs.joints, joints, strict=True)
        temporary = {joint.key: self._temporary[one.key] for one, joint in same}
        program = SavingProgram(joints, temporary, self._graphs.order)
        return _JointPlanner(self._graphs, joints, program, self._above, own)


class _JointPlanner:
    """Planner of a step's joint graphs. `first`: torch's own choice. `free`: about no seconds."""

    def __init__(
        self,
        graphs: Graphs,
        joints: Sequence[Joint],
        program: SavingProgram,
        above: Mapping[str, int],
        own: Simulated | None,
    ) -> None:
        self._graphs = graphs
        self._joints = {joint.key: joint for joint in joints}
        self._program = program
        self._above = above
        self._own_saved = {joint.key: joint.own for joint in joints}
        self._can_keep = any(joint.together for joint in joints)
        self.free = _FREE * program.whole
        self.first = (
            SavingChoice(self._own_saved, own, 0.0, own.peak_bytes)
            if own is not None
            else self._simulated(self._own_saved, 0, 0)
        )
        self.lowest = self.first

    def plan(self, budget: int) -> SavingChoice | None:
        """Return the choice with the least added time whose simulated peak is within a budget, or None.

        The model of the joint graph knows nothing of fusion, so it is corrected by what Inductor's code for a
        choice shows, at most a few times.
        """
        if _peak(self.first) <= budget:
            return self.first
        best, last, aim = None, self.first, _AIM * budget
        self._program.keeps = False
        for number in range(_ROUNDS):
            self._program.correct(last.saved, last.simulated)
            saved = self._program.choose(int(aim), _SECONDS)
            if saved is None:  # what the last choice needs more is not what each choice does
                self._program.correct(self.first.saved, self.first.simulated)
                saved = None if number else self._nearest(aim)
            if saved is None:
                if self._program.keeps or not self._can_keep:
                    aim *= budget / max(budget, _peak(last))
                self._program.keeps = self._can_keep
                saved = self._program.choose(int(aim), _SECONDS)
            saved = self._program.improved(saved or last.saved, int(aim), _SECONDS)
            if saved == last.saved:
                break
            last = self._tried(saved, number + 1, last.first_peak if number else 0)
            peak = _peak(last)
            if peak <= budget and (best is None or last.added_seconds < best.added_seconds):
                best = last
            if peak <= budget and (peak >= _NEAR * budget or last.added_seconds <= self.free):
                break
        known = self.lowest if _peak(self.lowest) <= budget else None
        return best or known

    def _nearest(self, aim: float) -> Saved | None:
        """Return a choice for the first higher aim that the model has one for, if any."""
        choices = (self._program.choose(int(aim * times), _SECONDS) for times in _HIGHER)
        return next((one for one in choices if one is not None), None)

    def _tried(self, saved: Saved, number: int, first: int) -> SavingChoice:
        choice = self._simulated(saved, number, first)
        self.lowest = min(self.lowest, choice, key=_peak)
        return choice

    def _simulated(self, saved: Saved, number: int, first: int) -> SavingChoice:
        simulated = self._graphs.memory(saved, self._above)
        return SavingChoice(
            saved,
            simulated,
            self.added_seconds(saved),
            first or simulated.peak_bytes,
            number,
            named(saved, self._joints),
        )

    def added_seconds(self, saved: Saved) -> float:
        """Return the seconds of computing again that a choice adds, by the model of costs."""
        return self._program.seconds(saved) - self._program.seconds(self._own_saved)


def _peak(choice: SavingChoice) -> int:
    return choice.simulated.peak_bytes


def named(saved: Saved, joints: Mapping[str, Joint]) -> tuple[CompiledGraph, ...]:
    """Return a choice by the names of graphs and tensors, which hold in other processes."""
    return tuple(_graph(joints[key], sorted(each)) for key, each in saved.items())


def _graph(joint: Joint, saved: Sequence[int]) -> CompiledGraph:
    values = [joint.values[at] for at in saved]
    return CompiledGraph(
        graph=joint.key,
        saves=tuple(one.key for one in values),
        double=joint.double,
        double_saves=tuple(dict.fromkeys(one.double for one in values)),
    )
