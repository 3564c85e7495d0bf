"""Edits of a step that run a call in parts, split by rows or channels."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torchtrim.step.edits import Block, Drop, Edit, Insert, Need, Rise
from torchtrim.step.index import index_of
from torchtrim.step.step import DEVICE, Span, Step

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
    return change.edit(seconds) if change.later else None


@dataclass
class _SplitCallEdit:
    """Builds the edit. `later`: the call's backward tasks, and the reruns of the script's checkpoints."""

    _step: Step
    _span: Span
    _parts: int
    _copies: bool
    _over: bool
    _within: tuple[int, int] | None

    def __post_init__(self) -> None:
        step, span = self._step, self._span
        self._now = range(*span)
        self.later = self._with_reruns(n for task in self._now for n in step.backward.get(task, ()))
        tasks = {*self._now, *self.later}
        made = [number for task in (*self._now, *self.later) for number in step.made_by[task]]
        outside = {n for i, task in enumerate(step.tasks) if i not in tasks for n in task.reads}
        kept = {n for n in made if n in outside or step.tensors[n].kind == "gradient"}
        kept |= {n for call in step.calls if call.span == span for n in call.outputs}
        self._gone = [number for number in made if number not in kept]
        self._results = [n for n in made if n in kept and step.tensors[n].birth in self._now]
        self._gradients = [n for n in made if n in kept and step.tensors[n].birth in self.later]
        added = index_of(step).added
        self._of_parameters = [
            n for n in self._gradients if n in added or step.tensors[n].kind == "gradient"
        ]

    def _with_reruns(self, backward: Iterable[int]) -> list[int]:
        """Add the tasks that rerun forward before the first of these, and between them."""
        found, tasks = {*backward}, self._step.tasks
        if not found:
            return []
        first = min(found)
        while tasks[first - 1].phase == "recompute":
            first -= 1
        between = range(first, max(found))
        return sorted(found | {task for task in between if tasks[task].phase == "recompute"})

    def edit(self, seconds: float) -> Edit:
        step, span, begin = self._step, self._span, self.later[0]
        blocks = tuple(
            Block(step.tensors[n].bytes, begin, step.tensors[n].birth + 1) for n in self._whole
        )
        seconds += sum(step.tasks[task].seconds for task in self._now)
        return Edit(
            drops=(
                *(Drop(n, i) for n in self._gone for i in range(len(step.tensors[n].holds))),
                *self._saved(),
            ),
            needs=tuple(Need(number, self._read_until()) for number in self._inputs()),
            blocks=blocks,
            inserts=(
                Insert(span.first, 0.0, self._forward()),
                Insert(begin, seconds, self._backward(), sum(block.bytes for block in blocks)),
            ),
            rises=(
                *(Rise(task, 0) for task in self.later),
                *(Rise(task, self._made_at(task, self._results)) for task in self._now),
            ),
            claims=(span,),
        )

    @property
    def _whole(self) -> list[int]:
        return self._of_parameters if self._over else self._gradients

    def _read_until(self) -> int:
        """The task until which the input lives: until its gradient is computed, if that overwrites it."""
        made = (self._step.tensors[n].birth for n in self._gradients if n not in self._whole)
        return max(made, default=self.later[0]) + 1

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

    def _backward(self) -> int:
        """Bytes of the gradients, plus one part's rerun or backward.

        Gradients of parameters are accumulated, and have their full size in each part.
        """
        if self._within is not None:
            return self._bytes(self._whole) + self._within[1]
        step, level, own = self._step, 0, self._of_parameters
        others = [
            (step.tensors[n].birth, len(step.tasks), n) for n in self._gradients if n not in own
        ]
        highest = self._again(saves=True)
        for task in self.later:
            made = self._made_at(task, own)
            within = self._level(task, others, saves=True) + step.tasks[task].transient - made
            highest = max(highest, level + made + max(within, 0) // self._parts)
            level += made
        comes = self._bytes(self._results) // self._parts if self._copies else 0
        return self._bytes(self._whole) + highest + comes + self._copied()

    def _again(self, *, saves: bool) -> int:
        """The largest rise of memory during the forward of a part."""
        tasks = self._step.tasks
        rises = (self._level(i, (), saves=saves) + tasks[i].transient for i in self._now)
        return max(rises) // self._parts

    def _copied(self) -> int:
        return self._bytes(self._inputs()) // self._parts if self._copies else 0

    def _level(self, at: int, others: Iterable[tuple[int, int, int]], *, saves: bool) -> int:
        """Bytes of dropped tensors that would be live before a task if the call ran as a whole."""
        tensors = self._step.tensors
        lives = [(tensors[n].birth, self._until(n, saves=saves), n) for n in self._gone]
        return self._bytes(n for birth, until, n in (*lives, *others) if birth < at < until)

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
