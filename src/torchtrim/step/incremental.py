"""The simulator for searches: options are switched on and off, and each switch costs only the change.

As long as no option changes anything, memory rises and falls as in the unedited step. So all tasks from one
such change to the next form a stretch, and only its highest point counts. Stretches are grouped in blocks; a
switch recomputes the sums of the few blocks that it touches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import add
from typing import NamedTuple

from torchtrim.step.edits import Edit
from torchtrim.step.simulate import Outcome, level, timeline
from torchtrim.step.step import DEVICE, Step


class TensorTie(NamedTuple):
    """The (option, hold) pairs that drop holds of a tensor, and the (option, task) pairs that need it."""

    drops: list[tuple[int, int]]
    needs: list[tuple[int, int]]

    @property
    def is_shared(self) -> bool:
        """True if several options affect the tensor."""
        return len({option for option, _ in (*self.drops, *self.needs)}) > 1


def ties_of(step: Step, edits: Sequence[Edit]) -> dict[int, TensorTie]:
    """Return the ties of the device tensors that options affect."""
    ties: defaultdict[int, TensorTie] = defaultdict(lambda: TensorTie([], []))
    for option, edit in enumerate(edits):
        for drop in edit.drops:
            ties[drop.tensor].drops.append((option, drop.hold))
        for need in edit.needs:
            ties[need.tensor].needs.append((option, need.until))
    tensors = step.tensors
    return {n: tie for n, tie in ties.items() if tensors[n].pool == DEVICE and tensors[n].bytes}


def starts_of(step: Step, edits: Sequence[Edit]) -> list[int]:
    """Return the tasks that may begin a change of the live bytes, the first task included."""
    count = len(step.tasks)
    moments = {0} if count else set()
    for edit in edits:
        for block in edit.blocks:
            moments.update((block.first, block.last))
        for insert in edit.inserts:
            moments.update((insert.at, insert.at + 1))
        for rise in edit.rises:
            moments.update((rise.task, rise.task + 1))
        for need in edit.needs:
            moments.update((need.until, step.tensors[need.tensor].death))
        for drop in edit.drops:
            tensor = step.tensors[drop.tensor]
            moments.update((tensor.birth + 1, *(hold.until for hold in tensor.holds)))
    return sorted(moment for moment in moments if 0 <= moment < count)


# Arbitrary; a switch sums over blocks of this size, and the peak is the highest over all blocks.
_BLOCK = 48


class _OptionDelta(NamedTuple):
    """Effect of one option in any choice: bytes by stretch, levels above them, and rises of own tasks."""

    steps: tuple[tuple[int, int], ...]
    levels: tuple[tuple[int, int], ...]
    rises: tuple[tuple[int, int], ...]
    seconds: float


class Simulation:
    """A step with the options that are on. `edits`: the edit of each option; all options start off."""

    def __init__(self, step: Step, edits: Sequence[Edit]) -> None:
        self._step = step
        self.edits = edits
        self.on: set[int] = set()
        self.seconds = 0.0
        self._starts = starts_of(step, edits)
        self._place = {task: place for place, task in enumerate(self._starts)}
        ties = ties_of(step, edits)
        self._ties = {n: tie for n, tie in ties.items() if tie.is_shared}
        self._ends = {number: step.tensors[number].death for number in self._ties}
        own = [ties_of(step, (edit,)) for edit in edits]
        self._changes = list(map(self._change_of, edits, own))
        self._shared = [[number for number in of if number in self._ties] for of in own]
        # The stretches of the unedited step: the change of bytes at each, and its highest point.
        before, high = timeline(step)
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
        """Recompute the change of bytes over a block, and its highest point above the level before it."""
        first, last = block * _BLOCK, (block + 1) * _BLOCK
        running = list(accumulate(self._rise[first:last]))
        self._sums[block] = running[-1]
        self._highs[block] = max(map(add, running, self._tops[first:last]))

    def changes(self, option: int) -> int:
        """Return how much a switch of this option changes: stretches, levels and shared tensors."""
        change = self._changes[option]
        return sum(map(len, (change.steps, change.levels, change.rises, self._shared[option])))

    def switch(self, options: Iterable[int]) -> None:
        """Flip each of these options."""
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
        for at, more in change.rises:
            self._over[at] += sign * more
        for at, _ in (*change.levels, *change.rises):
            self._tops[at] = max((self._over[at], *self._levels[at]))
            touched.add(at // _BLOCK)
        self.seconds += sign * change.seconds
        self.on ^= {option}
        for tensor in self._shared[option]:
            self._settle(tensor, touched)

    def _settle(self, tensor: int, touched: set[int]) -> None:
        now, old = self._end(tensor), self._ends[tensor]
        if now == old:
            return
        self._ends[tensor] = now
        size = self._step.tensors[tensor].bytes
        for at, change in ((old, size), (now, -size)):
            if (place := self._place.get(at)) is not None:
                self._rise[place] += change
                touched.add(place // _BLOCK)

    @property
    def peak_bytes(self) -> int:
        """The peak of the step with the options that are on."""
        starts = accumulate(self._sums, initial=0)
        return max(map(add, starts, self._highs), default=0)

    @property
    def outcome(self) -> Outcome:
        """The peak, the task that sets it, and the added seconds."""
        peak = self.peak_bytes
        if not self._starts:
            return Outcome(peak, -1, self.seconds)
        starts = accumulate(self._sums, initial=0)
        block = next(i for i, s in enumerate(map(add, starts, self._highs)) if s == peak)
        first = block * _BLOCK
        now = sum(self._sums[:block])
        for place in range(first, min(first + _BLOCK, len(self._starts))):
            now += self._rise[place]
            if now + self._tops[place] == peak:
                tasks = self._where if self._tops[place] == self._over[place] else self._starts
                return Outcome(peak, tasks[place], self.seconds)
        raise AssertionError("a block's highest is in the block")

    def peak_from(self, task: int) -> int:
        """Return the peak from the start of the stretch that contains a task."""
        place = max(bisect_right(self._starts, task) - 1, 0)
        first = place // _BLOCK
        now = sum(self._sums[:first]) + sum(self._rise[first * _BLOCK : place])
        rest = self._rise[place:]
        return now + max(map(add, accumulate(rest), self._tops[place:]), default=0)

    def _end(self, tensor: int) -> int:
        drops, needs = self._ties[tensor]
        dropped = {hold for option, hold in drops if option in self.on}
        needed = (until for option, until in needs if option in self.on)
        return self._step.tensors[tensor].end(dropped, needed)

    def _change_of(self, edit: Edit, own: Mapping[int, TensorTie]) -> _OptionDelta:
        steps: Counter[int] = Counter()

        def alive(first: int, last: int, size: int) -> None:
            for at, change in ((first, size), (last, -size)):
                if (place := self._place.get(at)) is not None:
                    steps[place] += change

        for block in edit.blocks:
            if block.pool == DEVICE:
                alive(block.first, block.last, block.bytes)
        for number, (drops, needs) in own.items():
            if number not in self._ties:
                tensor = self._step.tensors[number]
                end = tensor.end({hold for _, hold in drops}, (u for _, u in needs))
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
        changes = tuple((at, size) for at, size in steps.items() if size)
        return _OptionDelta(changes, levels, rises, edit.seconds)
