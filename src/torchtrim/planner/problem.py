"""What a solver is given: a step, and options of which those with overlapping claims exclude each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from torchtrim.executor.registry import Option
from torchtrim.step.edits import Edit
from torchtrim.step.incremental import Simulation
from torchtrim.step.links import added_seconds
from torchtrim.step.simulate import Outcome
from torchtrim.step.step import DEVICE, Step

Chosen = tuple[int, ...]
"""Numbers of options, in ascending order."""


class Effect(NamedTuple):
    """What an option does to the bytes alive, alone and to first order.

    `frees` and `takes`: bytes during the tasks `first <= i < last`. `runs`: the tasks before which it
    inserts work. `most`: what it can free at most, together with any others.
    """

    frees: tuple[tuple[int, int, int], ...]
    takes: tuple[tuple[int, int, int], ...]
    runs: tuple[int, ...]
    most: tuple[tuple[int, int, int], ...]


class Problem:
    """Options with what they change, and a simulation in which they are tried.

    `forced` are the edits that are on whatever is chosen; no option clashes with them.
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
        self._on = frozenset(range(len(edits), len(edits) + len(forced)))
        self._simulation = Simulation(step, [*edits, *forced])
        self._known: dict[Chosen, Outcome] = {}

    def only(self, numbers: Sequence[int]) -> Problem:
        """The problem with these options alone."""
        options = [self.options[number] for number in numbers]
        return Problem(self.step, options, [self.edits[number] for number in numbers], self.forced)

    @property
    def tried(self) -> int:
        """How many sets of options were simulated."""
        return len(self._known)

    def run(self, chosen: Chosen) -> Outcome:
        """The step with these options."""
        known = self._known.get(chosen)
        if known is None:
            added = self._added(chosen)
            known = self._with(chosen).outcome._replace(added_seconds=added)
            self._known[chosen] = known
        return known

    def _added(self, chosen: Chosen) -> float:
        """Seconds that options add together. Those that share a link await each other's copies there."""
        edits = [*(self.edits[number] for number in chosen), *self.forced]
        if any(edit.trips for edit in edits):
            return added_seconds(self.step, edits)
        return self.forced_seconds + self.sum(chosen)

    @cached_property
    def is_additive(self) -> bool:
        """Whether no choice can add less than the sum of its options: none is awaited when it is alone."""
        return not any(trip.alone for edit in (*self.edits, *self.forced) for trip in edit.trips)

    def peak_from(self, chosen: Chosen, task: int) -> int:
        """The highest bytes from a task on."""
        return self._with(chosen).peak_from(task)

    def _with(self, chosen: Chosen) -> Simulation:
        self._simulation.switch(self._simulation.on ^ self._on.union(chosen))
        return self._simulation

    def sum(self, options: Iterable[int]) -> float:
        """Seconds that options add."""
        return sum(map(self.seconds.__getitem__, options))

    @cached_property
    def seconds(self) -> list[float]:
        """Seconds that each option adds alone."""
        return [edit.seconds for edit in self.edits]

    @cached_property
    def work_seconds(self) -> list[float]:
        """Seconds that each option adds at least, whatever else is chosen."""
        return [edit.work_seconds for edit in self.edits]

    @cached_property
    def forced_seconds(self) -> float:
        """Seconds that the forced edits add at least."""
        return sum(edit.work_seconds for edit in self.forced)

    @cached_property
    def forced_effects(self) -> list[Effect]:
        """The effect of each edit that is forced."""
        return [_effect(self.step, edit) for edit in self.forced]

    @cached_property
    def clashes(self) -> list[frozenset[int]]:
        """For each option those whose claims overlap its own."""
        found: list[set[int]] = [set() for _ in self.edits]
        spans = sorted(
            (span.first, span.last, number)
            for number, edit in enumerate(self.edits)
            for span in edit.claims
        )
        open_: list[tuple[int, int]] = []
        for first, last, number in spans:
            open_ = [(end, other) for end, other in open_ if end > first]
            for _, other in open_:
                if other != number:
                    found[number].add(other)
                    found[other].add(number)
            open_.append((last, number))
        return list(map(frozenset, found))

    @cached_property
    def effects(self) -> list[Effect]:
        """The effect of each option."""
        return [_effect(self.step, edit) for edit in self.edits]

    def freed(self, option: int, task: int) -> int:
        """Bytes that an option frees while a task runs, to first order."""
        effect = self.effects[option]
        freed = sum(size for first, last, size in effect.frees if first <= task < last)
        return freed - sum(size for first, last, size in effect.takes if first <= task < last)

    def apart(self, order: Iterable[int]) -> list[int]:
        """The options of an order that do not exclude an earlier one."""
        taken: list[int] = []
        barred: set[int] = set()
        for number in order:
            if number not in barred:
                taken.append(number)
                barred |= self.clashes[number]
        return taken


def _effect(step: Step, edit: Edit) -> Effect:
    gone: dict[int, set[int]] = {}
    for drop in edit.drops:
        gone.setdefault(drop.tensor, set()).add(drop.hold)
    needed = {need.tensor: need.until for need in edit.needs}
    frees, most = [], []
    for number, holds in gone.items():
        tensor = step.tensors[number]
        if tensor.pool != DEVICE or not tensor.bytes:
            continue
        kept = [hold.until for place, hold in enumerate(tensor.holds) if place not in holds]
        first = max((tensor.birth + 1, needed.get(number, 0), *kept))
        if first < tensor.death:
            frees.append((first, tensor.death, tensor.bytes))
        sure = [
            hold.until
            for place, hold in enumerate(tensor.holds)
            if hold.saver < 0 and place not in holds
        ]
        most.append((max((tensor.birth + 1, *sure)), tensor.death, tensor.bytes))
    for rise in edit.rises:
        span = rise.task, rise.task + 1, step.tasks[rise.task].transient - rise.bytes
        frees.append(span)
        most.append(span)
    takes = [(b.first, b.last, b.bytes) for b in edit.blocks if b.pool == DEVICE]
    runs = tuple(insert.at for insert in edit.inserts)
    return Effect(tuple(frees), tuple(takes), runs, tuple(most))
