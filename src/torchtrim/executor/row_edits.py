"""Edits of a step that run a call in parts, split by rows or channels."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torchtrim.step.edits import Block, Drop, Edit, Insert, Need, Rise
from torchtrim.step.index import index_of, passes_of
from torchtrim.step.step import DEVICE, Hold, Span, Step

_PART_SECONDS = 2e-4
"""Measured overhead of a part, forward and backward: the calls of the module and of autograd."""


def edit_of(
    step: Step,
    span: Span,
    parts: int,
    *,
    copies: bool = False,
    over: bool = False,
    within: tuple[int, int] | None = None,
    seconds: float | None = None,
) -> Edit | None:
    """Return the edit that replaces a call by parts, or None if backward does not reach it.

    `copies`: each part copies its share of the input. `over`: the input's gradient overwrites the input.
    `within`: rise of memory in bytes within a part, forward and backward, if known without the tasks.
    `seconds`: time of the parts in addition to the rerun forward, if known.
    """
    change = _SplitCallEdit(step, span, parts, copies, over, within)
    seconds = parts * _PART_SECONDS if seconds is None else seconds
    return change.edit(seconds) if change.passes else None


def left_before(step: Step, hold: Hold, tasks: Sequence[int]) -> int:
    """Return the task before which a part leaves what it holds, if `tasks` are a pass of its backward.

    A part saves for one pass, also where the program retains its graph for another.
    """
    uses = [one for one in step.backward.get(hold.saver, ()) if tasks[0] <= one <= tasks[-1]]
    return min(hold.until, uses[-1] + 1) if uses else hold.until


@dataclass
class _SplitCallEdit:
    """Builds the edit.

    `passes`: the tasks of each backward through the call, and the reruns of the script's checkpoints.
    """

    _step: Step
    _span: Span
    _parts: int
    _copies: bool
    _over: bool
    _within: tuple[int, int] | None

    def __post_init__(self) -> None:
        step, span = self._step, self._span
        self._now = range(*span)
        self.passes = passes_of(step, span)
        later = {task for tasks in self.passes for task in tasks}
        tasks = {*self._now, *later}
        made = [number for task in sorted(tasks) for number in step.made_by[task]]
        outside = {n for i, task in enumerate(step.tasks) if i not in tasks for n in task.reads}
        kept = {n for n in made if n in outside or step.tensors[n].kind == "gradient"}
        kept |= {n for call in step.calls if call.span == span for n in call.outputs}
        self._gone = [number for number in made if number not in kept]
        self._results = [n for n in made if n in kept and step.tensors[n].birth in self._now]
        self._gradients = [n for n in made if n in kept and step.tensors[n].birth in later]
        added = index_of(step).added
        self._of_parameters = [
            n for n in self._gradients if n in added or step.tensors[n].kind == "gradient"
        ]

    def edit(self, seconds: float) -> Edit:
        step, span = self._step, self._span
        seconds += sum(step.tasks[task].seconds for task in self._now)
        blocks, inserts = [], [Insert(span.first, 0.0, self._forward())]
        for tasks in self.passes:
            whole = self._whole(tasks)
            blocks += [
                Block(step.tensors[n].bytes, tasks[0], step.tensors[n].birth + 1) for n in whole
            ]
            makes = sum(step.tensors[n].bytes for n in whole)
            inserts.append(Insert(tasks[0], seconds, self._backward(tasks), makes))
        later = (task for tasks in self.passes for task in tasks)
        return Edit(
            drops=(
                *(Drop(n, i) for n in self._gone for i in range(len(step.tensors[n].holds))),
                *self._saved(),
            ),
            needs=tuple(Need(number, self._read_until()) for number in self._inputs()),
            blocks=tuple(blocks),
            inserts=tuple(inserts),
            rises=(
                *(Rise(task, 0) for task in later),
                *(Rise(task, self._made_at(task, self._results)) for task in self._now),
            ),
            claims=(span,),
        )

    def _made_in(self, tasks: Collection[int]) -> list[int]:
        """The gradients that a pass computes."""
        return [n for n in self._gradients if self._step.tensors[n].birth in tasks]

    def _whole(self, tasks: Sequence[int]) -> list[int]:
        """Gradients of a pass with memory of their own. Only the last pass overwrites the input."""
        made = self._made_in(tasks)
        if self._over and tasks is self.passes[-1]:
            return [n for n in made if n in self._of_parameters]
        return made

    def _read_until(self) -> int:
        """The task until which the input lives: until its gradient is computed, if that overwrites it."""
        last = self.passes[-1]
        over = {*self._made_in(last)} - {*self._whole(last)}
        return max((self._step.tensors[n].birth for n in over), default=last[0]) + 1

    def _saved(self) -> list[Drop]:
        dropped, saved = {*self._gone}, self._step.saved
        return [Drop(*one) for task in self._now for one in saved[task] if one[0] not in dropped]

    def _inputs(self) -> list[int]:
        step, first = self._step, self._span.first
        read = {n: step.tensors[n] for task in self._now for n in step.tasks[task].reads}
        return [n for n, one in read.items() if one.birth < first and one.kind != "parameter"]

    def _forward(self) -> int:
        if self._within is not None:
            return self._bytes(self._results) + self._within[0]
        return self._bytes(self._results) + self._again(saves=False) + self._copied()

    def _backward(self, tasks: Sequence[int]) -> int:
        """Bytes of a pass's gradients, plus one part's rerun or backward.

        Gradients of parameters are accumulated, and have their full size in each part.
        """
        whole = self._bytes(self._whole(tasks))
        if self._within is not None:
            return whole + self._within[1]
        step, level, own = self._step, 0, self._of_parameters
        others = [n for n in self._made_in(tasks) if n not in own]
        lives = [(step.tensors[n].birth, len(step.tasks), n) for n in others]
        lives += [(step.tensors[n].birth, self._left(n, tasks), n) for n in self._gone]
        highest = self._again(saves=True)
        for task in tasks:
            made = self._made_at(task, own)
            within = self._level(task, lives) + step.tasks[task].transient - made
            highest = max(highest, level + made + max(within, 0) // self._parts)
            level += made
        comes = self._bytes(self._results) // self._parts if self._copies else 0
        return whole + highest + comes + self._copied()

    def _again(self, *, saves: bool) -> int:
        """The largest rise of memory during the forward of a part."""
        step = self._step
        lives = [(step.tensors[n].birth, self._until(n, saves=saves), n) for n in self._gone]
        rises = (self._level(i, lives) + step.tasks[i].transient for i in self._now)
        return max(rises) // self._parts

    def _copied(self) -> int:
        return self._bytes(self._inputs()) // self._parts if self._copies else 0

    def _level(self, at: int, lives: Iterable[tuple[int, int, int]]) -> int:
        """Bytes of tensors that would be live before a task if the call ran as a whole."""
        return self._bytes(n for birth, until, n in lives if birth < at < until)

    def _left(self, number: int, tasks: Sequence[int]) -> int:
        """The end of a tensor's life in a pass."""
        tensor = self._step.tensors[number]
        ends = (left_before(self._step, hold, tasks) for hold in tensor.holds)
        return max(ends, default=tensor.birth + 1)

    def _until(self, number: int, *, saves: bool) -> int:
        """The end of a tensor's life. Without `saves`, saved tensors do not count."""
        tensor = self._step.tensors[number]
        holds = (hold.until for hold in tensor.holds if saves or hold.saver < 0)
        return max(holds, default=tensor.birth + 1)

    def _made_at(self, task: int, numbers: Collection[int]) -> int:
        return sum(self._step.tensors[n].bytes for n in self._step.made_by[task] if n in numbers)

    def _bytes(self, numbers: Iterable[int]) -> int:
        tensors = (self._step.tensors[n] for n in numbers)
        return sum(one.bytes for one in tensors if one.pool == DEVICE)
