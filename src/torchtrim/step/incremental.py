"""The simulator for searches: options are switched on and off, and each switch costs the change.

Between the moments at which some option changes anything the bytes alive rise and fall as in the step as it
is, so all between two such moments is one stretch, of which only the highest counts. Stretches
are kept in blocks; a switch sums up the few blocks anew that it touches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import add
from typing import NamedTuple

from torchtrim.step.edits import Edit
from torchtrim.step.simulate import Outcome, level, timeline
from torchtrim.step.step import DEVICE, Step
from torchtrim.step.ties import Tie, ends_at, starts_of, ties_of

_BLOCK = 48


class _Change(NamedTuple):
    """What an option changes whatever else is on: bytes at stretches, levels above them, and by how much
    the stretches' own tasks rise."""

    steps: tuple[tuple[int, int], ...]
    levels: tuple[tuple[int, int], ...]
    rises: tuple[tuple[int, int], ...]
    seconds: float


class Simulation:
    """The step with the options that are on. `edits`: what each option changes; none is on at first."""

    def __init__(self, step: Step, edits: Sequence[Edit]) -> None:
        self._step = step
        self.edits = edits
        self.on: set[int] = set()
        self.seconds = 0.0
        self._starts = starts_of(step, edits)
        self._place = {task: place for place, task in enumerate(self._starts)}
        ties = ties_of(step, edits)
        self._ties = {n: tie for n, tie in ties.items() if len(tie.options) > 1}
        self._ends = {number: step.tensors[number].death for number in self._ties}
        own = {n: tie for n, tie in ties.items() if len(tie.options) == 1}
        self._changes = [self._change_of(i, edit, own) for i, edit in enumerate(edits)]
        self._shared = [self._shared_of(edit) for edit in edits]
        self._build()

    def _build(self) -> None:
        """The stretches of the step as it is: by how much bytes change at each, and the highest in it."""
        before, high = timeline(self._step)
        edges = [*self._starts, len(high)]
        self._where = [max(range(a, b), key=high.__getitem__) for a, b in pairwise(edges)]
        self._over = [high[at] - before[a] for at, a in zip(self._where, self._starts, strict=True)]
        entering = [before[a] for a in self._starts]
        self._rise = [b - a for a, b in zip([0, *entering], entering, strict=False)]
        self._levels: list[list[int]] = [[] for _ in self._starts]
        self._tops = list(self._over)
        count = -(-len(self._starts) // _BLOCK)
        self._sums, self._highs = [0] * count, [0] * count
        for block in range(count):
            self._sum_up(block)

    def _sum_up(self, block: int) -> None:
        """A block's change of bytes, and its highest over the bytes alive before it."""
        first, last = block * _BLOCK, (block + 1) * _BLOCK
        running = list(accumulate(self._rise[first:last]))
        self._sums[block] = running[-1]
        self._highs[block] = max(map(add, running, self._tops[first:last]))

    def switch(self, options: Iterable[int]) -> None:
        """Switch each of these options, on if it is off."""
        touched: set[int] = set()
        for option in options:
            self._switch(option, touched)
        for block in touched:
            self._sum_up(block)

    def _switch(self, option: int, touched: set[int]) -> None:
        sign = -1 if option in self.on else 1
        change = self._changes[option]
        for at, size in change.steps:
            self._rise[at] += sign * size
            touched.add(at // _BLOCK)
        for at, height in change.levels:
            self._levels[at].append(height) if sign > 0 else self._levels[at].remove(height)
            self._tops[at] = max((self._over[at], *self._levels[at]))
            touched.add(at // _BLOCK)
        for at, more in change.rises:
            self._over[at] += sign * more
            self._tops[at] = max((self._over[at], *self._levels[at]))
            touched.add(at // _BLOCK)
        self.seconds += sign * change.seconds
        self.on ^= {option}
        for tensor in self._shared[option]:
            self._settle(tensor, touched)

    def _settle(self, tensor: int, touched: set[int]) -> None:
        """Move the end of a tensor that several options bear on to where it now is."""
        now, old = self._end(tensor), self._ends[tensor]
        if now == old:
            return
        self._ends[tensor] = now
        size = self._step.tensors[tensor].bytes
        for at, change in ((old, size), (now, -size)):
            place = self._place.get(at)
            if place is not None:
                self._rise[place] += change
                touched.add(place // _BLOCK)

    @property
    def peak_bytes(self) -> int:
        """The highest bytes of the step with what is on."""
        starts = accumulate(self._sums, initial=0)
        return max(map(add, starts, self._highs), default=0)

    @property
    def outcome(self) -> Outcome:
        """The peak with the task that sets it, and the seconds that are added."""
        peak = self.peak_bytes
        if not self._starts:
            return Outcome(peak, -1, self.seconds)
        starts = accumulate(self._sums, initial=0)
        block = next(i for i, s in enumerate(map(add, starts, self._highs)) if s == peak)
        first = block * _BLOCK
        level_ = sum(self._sums[:block])
        for place in range(first, min(first + _BLOCK, len(self._starts))):
            level_ += self._rise[place]
            if level_ + self._tops[place] == peak:
                highest = self._tops[place] == self._over[place]
                return Outcome(
                    peak, self._where[place] if highest else self._starts[place], self.seconds
                )
        raise AssertionError("a block's highest is in the block")

    def peak_from(self, task: int) -> int:
        """The highest bytes from the stretch on that begins at a task, or that it is in."""
        place = max(bisect_right(self._starts, task) - 1, 0)
        first = place // _BLOCK
        level_ = sum(self._sums[:first]) + sum(self._rise[first * _BLOCK : place])
        rest = self._rise[place:]
        return level_ + max(map(add, accumulate(rest), self._tops[place:]), default=0)

    def _end(self, tensor: int) -> int:
        """When a tensor dies with what is on."""
        drops, needs, _ = self._ties[tensor]
        on = self.on
        gone = {hold for option, hold in drops if option in on}
        needed = (until for option, until in needs if option in on)
        return ends_at(self._step.tensors[tensor], gone, needed)

    def _change_of(self, option: int, edit: Edit, own: Mapping[int, Tie]) -> _Change:
        steps: Counter[int] = Counter()

        def alive(first: int, last: int, size: int) -> None:
            for at, change in ((first, size), (last, -size)):
                if (place := self._place.get(at)) is not None:
                    steps[place] += change

        for block in edit.blocks:
            if block.pool == DEVICE:
                alive(block.first, block.last, block.bytes)
        for number in self._numbers(edit):
            if number in own:
                drops, needs, _ = own[number]
                tensor = self._step.tensors[number]
                end = ends_at(tensor, {hold for _, hold in drops}, (u for _, u in needs))
                alive(tensor.death, end, tensor.bytes)
        levels = tuple(
            (self._place[insert.at], level(insert))
            for insert in edit.inserts
            if insert.at in self._place
        )
        rises = tuple(
            (self._place[rise.task], rise.bytes - self._step.tasks[rise.task].transient)
            for rise in edit.rises
        )
        return _Change(tuple((at, n) for at, n in steps.items() if n), levels, rises, edit.seconds)

    def _shared_of(self, edit: Edit) -> tuple[int, ...]:
        return tuple(number for number in self._numbers(edit) if number in self._ties)

    @staticmethod
    def _numbers(edit: Edit) -> Iterable[int]:
        """The tensors whose end an edit may move."""
        return dict.fromkeys((*(d.tensor for d in edit.drops), *(n.tensor for n in edit.needs)))
