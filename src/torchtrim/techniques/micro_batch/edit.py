"""What a step is with a span that runs in parts of the batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property

from torchtrim.records.operator_names import base_name
from torchtrim.step.edits import Block, Drop, Edit, Insert, Need, Rise
from torchtrim.step.step import DEVICE, Span, Step
from torchtrim.techniques.micro_batch.found import batch_size, given_to

_STATE = frozenset(("parameter", "buffer", "optimizer_state", "gradient", "gathered"))
_FIRST_MATRIX = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
_SECONDS_AN_OPERATOR = 1e-5
_SECONDS_A_PART = 5e-4
_SECONDS_WATCHED = 1e-5
"""Of an operator that is looked at, since it might draw random numbers."""


def edit_of(step: Step, span: Span, parts: int) -> Edit | None:
    """The parts in place of the whole batch; None where backward does not come by."""
    change = _Change(step, span, parts)
    return change.edit() if change.backward else None


class _Change:
    """The parts of the edit: `backward` are the tasks that compute the span's gradients."""

    def __init__(self, step: Step, span: Span, parts: int) -> None:
        self._step = step
        self._span = span
        self._parts = parts
        self.backward = sorted(
            {b for task in range(*span) for b in step.backward.get(task, ())} - set(range(*span))
        )
        size = batch_size(step, span)
        self._share = -(-size // parts) / size
        self._tasks = (*range(*span), *self.backward)

    def edit(self) -> Edit:
        """Forward without gradients, and each part's forward and backward where backward begins."""
        begins, ends = self.backward[0], self.backward[-1] + 1
        early = (
            *self._early(self._leaving, self._span.first),
            *self._early(self._gradients, begins),
        )
        forward, backward = self._seconds
        out, grads = (self._bytes(self._leaving), self._bytes(self._gradients))
        state = self._step.overhead.random_state
        inserts = (
            Insert(self._span.first, forward, self._rise(range(*self._span)) + out, out),
            Insert(begins, backward, state + self._rise(self._tasks) + grads, grads),
        )
        return Edit(
            drops=tuple(self._drops()),
            needs=tuple(Need(number, ends) for number in self._needed),
            blocks=(*early, Block(state, self._span.first, ends)),
            inserts=inserts,
            rises=tuple(Rise(task, 0) for task in self._tasks),
            claims=(self._span, Span(begins, ends)),
        )

    @cached_property
    def _made(self) -> list[int]:
        """What the span and its backward make."""
        return [n for task in self._tasks for n in self._step.made_by[task]]

    @cached_property
    def _read_outside(self) -> frozenset[int]:
        """What other tasks look at, and what the calls of the span return."""
        inside = set(self._tasks)
        found = {n for c in self._step.calls if c.span == self._span for n in c.outputs}
        for index, task in enumerate(self._step.tasks):
            if index not in inside:
                found.update(task.reads, task.writes)
        return frozenset(found)

    @property
    def _leaving(self) -> list[int]:
        """What comes out of forward."""
        made = (n for task in range(*self._span) for n in self._step.made_by[task])
        return [n for n in made if n in self._read_outside]

    @property
    def _gradients(self) -> list[int]:
        """What comes out of backward: gradients of parameters and of inputs."""
        made = (n for task in self.backward for n in self._step.made_by[task])
        return [
            n for n in made if n in self._read_outside or self._step.tensors[n].kind == "gradient"
        ]

    def _bytes(self, numbers: Iterable[int]) -> int:
        tensors = (self._step.tensors[n] for n in numbers)
        return sum(t.bytes for t in tensors if t.pool == DEVICE)

    def _early(self, numbers: Iterable[int], at: int) -> Iterator[Block]:
        """What comes out is there from the first part on."""
        for number in numbers:
            tensor = self._step.tensors[number]
            if tensor.pool == DEVICE:
                yield Block(tensor.bytes, at, tensor.birth + 1)

    def _drops(self) -> Iterator[Drop]:
        """Nothing of the whole batch is kept, but for what comes out."""
        stays = {*self._leaving, *self._gradients}
        for number in self._made:
            if number not in stays:
                holds = range(len(self._step.tensors[number].holds))
                yield from (Drop(number, hold) for hold in holds)
        for task in range(*self._span):
            for number, hold in self._step.saved[task]:
                if number in stays or number not in set(self._made):
                    yield Drop(number, hold)

    @property
    def _needed(self) -> list[int]:
        """What parts are cut from: what goes into the span, and the gradient of what comes out."""
        made = set(self._made)
        read = {n for task in self._tasks for n in self._step.tasks[task].reads}
        read |= given_to(self._step, self._span)
        return sorted(
            n
            for n in read - made - set(self._leaving)
            if self._step.tensors[n].kind not in _STATE and self._step.tensors[n].pool == DEVICE
        )

    @cached_property
    def _of_batch(self) -> frozenset[int]:
        """All that comes from the samples, gradients of parameters apart."""
        found = {*given_to(self._step, self._span), *self._read_outside & set(self._made)}
        for task in self._tasks:
            if any(n in found for n in self._step.tasks[task].reads):
                found.update(self._step.tasks[task].makes)
        return frozenset(n for n in found if self._step.tensors[n].kind not in _STATE)

    def _size(self, number: int) -> int:
        tensor = self._step.tensors[number]
        if tensor.pool != DEVICE:
            return 0
        return int(tensor.bytes * self._share) if number in self._of_batch else tensor.bytes

    def _transient(self, index: int) -> int:
        """How high memory rises in a part's task; what draws random numbers draws them for all."""
        step = self._step
        task = step.tasks[index]
        if step.operators[index].random:
            return max(task.transient, sum(step.tensors[n].bytes for n in task.makes))
        made = step.made_by[index]
        own = sum(step.tensors[n].bytes for n in made if step.tensors[n].pool == DEVICE)
        return sum(map(self._size, made)) + self._scratch(index, max(task.transient - own, 0))

    def _scratch(self, index: int, scratch: int) -> int:
        """What a part's task needs beside its results, of what it needs for the whole batch.

        A product of matrices packs its first as a whole, which is smaller in a part, and others by blocks,
        which are not.
        """
        operator = self._step.operators[index]
        first = _FIRST_MATRIX.get(base_name(operator.name))
        if first is None or operator.inputs[first].storage not in self._of_batch:
            return int(scratch * self._share)
        packed = min(self._step.tensors[operator.inputs[first].storage].bytes, scratch)
        return scratch - int(packed * (1 - self._share))

    def _rise(self, tasks: Iterable[int]) -> int:
        """The highest that memory rises while one part runs."""
        step, order = self._step, list(tasks)
        graded = order[-1] >= self._span.last
        level = rise = 0
        ends: defaultdict[int, int] = defaultdict(int)
        for index in order:
            for at in [at for at in ends if at <= index]:
                level -= ends.pop(at)
            rise = max(rise, level + self._transient(index))
            for number in step.made_by[index]:
                size = self._size(number)
                level += size
                ends[max(self._until(number, graded=graded), index + 1)] += size
        return rise

    def _until(self, number: int, *, graded: bool) -> int:
        """Until when a part's tensor is held: a gradient until it is added to the others."""
        tensor = self._step.tensors[number]
        if tensor.kind == "gradient":
            return tensor.birth + 1
        holds = tensor.holds if graded else [h for h in tensor.holds if h.saver < 0]
        return max((h.until for h in holds), default=tensor.birth + 1)

    @property
    def _seconds(self) -> tuple[float, float]:
        """What the parts take over the whole: in forward, and in backward, where forward runs again."""
        step, more = self._step, self._parts - 1
        span = range(*self._span)
        own = sum(step.tasks[i].seconds for i in span)
        random = [i for i in span if step.operators[i].random]
        drawn = sum(step.tasks[i].seconds for i in random)
        watched = self._parts * len(span) * _SECONDS_WATCHED if random else 0.0
        first = watched + more * (len(span) * _SECONDS_AN_OPERATOR + _SECONDS_A_PART + drawn)
        again = own + first + drawn
        return first, again + more * len(self.backward) * _SECONDS_AN_OPERATOR
