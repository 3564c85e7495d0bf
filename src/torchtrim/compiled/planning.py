"""A plan of compiled graphs: chosen on joint graphs, and checked in the code of Inductor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

from torchtrim.compiled.choose import Saved, SavingProgram
from torchtrim.compiled.graphs import Graphs
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
    """Planner of a watched program's last step. `lowest`: the tried choice with the smallest peak.

    `alone`: the bytes that each graph saves, and its peak. `measured`: the peak of each phase of the step as
    torch compiles it, to which all figures then refer: eager code runs in between.
    """

    def __init__(self, graphs: Graphs, measured: Mapping[str, int] = {}) -> None:
        self._graphs = graphs
        self.own = graphs.memory()
        self._above = above(measured, self.own.phases)
        if self._above:
            self.own = graphs.memory(above=self._above)
        joints = graphs.joints
        self._own_saved = {joint.key: joint.own for joint in joints}
        alone = {
            graph.joint.key: memory_of([GraphCall(graph.pair())], graphs.rises)
            for graph in graphs.graphs
            if graph.joint is not None
        }
        self.alone = tuple((one.saved_bytes, one.peak_bytes) for one in alone.values())
        self._program = SavingProgram(
            joints,
            {key: one.forward_peak - one.saved_bytes for key, one in alone.items()},
            graphs.order,
        )
        self._can_keep = any(joint.together for joint in joints)
        self._unplanned = SavingChoice(self._own_saved, self.own, 0.0, self.own.peak_bytes)
        self.lowest = self._unplanned
        self._free = _FREE * sum(value.seconds for joint in joints for value in joint.values)

    def plan(self, budget: int) -> SavingChoice | None:
        """Return the choice with the least added time whose simulated peak is within a budget, or None.

        The model of the joint graph knows nothing of fusion, so it is corrected by what Inductor's code for a
        choice shows, at most a few times.
        """
        if self.own.peak_bytes <= budget:
            return self._unplanned
        if self._kept.simulated.peak_bytes <= budget:
            return self._kept
        best, last, aim = None, self._kept, _AIM * budget
        self._program.keeps = False
        for number in range(_ROUNDS):
            self._program.correct(last.saved, last.simulated)
            saved = self._program.choose(int(aim), _SECONDS)
            if saved is None:  # what the last choice needs more is not what each choice does
                self._program.correct(self._kept.saved, self._kept.simulated)
                if self._program.keeps or not self._can_keep:
                    aim *= budget / max(budget, last.simulated.peak_bytes)
                self._program.keeps = self._can_keep
                saved = self._program.choose(int(aim), _SECONDS)
            saved = self._program.improved(saved or last.saved, int(aim), _SECONDS)
            if saved == last.saved:
                break
            last = self._tried(saved, number + 1, last.first_peak if number else 0)
            peak = last.simulated.peak_bytes
            if peak <= budget and (best is None or last.added_seconds < best.added_seconds):
                best = last
            if peak <= budget and (peak >= _NEAR * budget or last.added_seconds <= self._free):
                break
        known = self.lowest if self.lowest.simulated.peak_bytes <= budget else None
        return best or known

    @cached_property
    def _kept(self) -> SavingChoice:
        """Torch's own choice, in graphs edited to free memory sooner."""
        return self._tried(self._own_saved, 0, 0)

    def _tried(self, saved: Saved, number: int, first: int) -> SavingChoice:
        simulated, named = self._graphs.memory(saved, self._above), self._graphs.named(saved)
        choice = SavingChoice(
            saved,
            simulated,
            self.added_seconds(saved),
            first or simulated.peak_bytes,
            number,
            named,
        )
        self.lowest = min(self.lowest, choice, key=lambda one: one.simulated.peak_bytes)
        return choice

    def added_seconds(self, saved: Saved) -> float:
        """Return the seconds of computing again that a choice adds, by the model of costs."""
        return self._program.seconds(saved) - self._program.seconds(self._own_saved)
