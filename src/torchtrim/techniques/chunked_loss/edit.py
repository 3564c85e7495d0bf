"""What a step is with its loss taken in chunks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torchtrim.records.operator_names import base_name
from torchtrim.step.edits import Block, Drop, Edit, Insert, Need, Rise
from torchtrim.step.step import Span, Step
from torchtrim.techniques.chunked_loss.found import FoundHead, family_tasks, gradient_of

_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_INDEX = 8
_PASSING = 9
_CHUNK_SECONDS = 1e-4


def edit_of(step: Step, head: FoundHead) -> Edit | None:
    """The chunks in place of whole logits; None where backward does not come by."""
    assert step.profile is not None
    begins, maker = gradient_of(step.profile, head)
    if begins < 0 or head.hidden.dtype not in _BYTES:
        return None
    unit = maker is not None and base_name(maker.name) == "aten::ones_like"
    unit = unit and step.profile.device.startswith("cpu")
    late = head.each or head.hidden.dtype == "float16"
    change = _Change(step, head, begins)
    return change.late() if late else change.early(unit=unit)


class _Sizes(NamedTuple):
    """Bytes: `vectors`, a few values of each row; `chunk`, the buffers of a chunk.

    `sums`: what gradients take while they are added up, over what they take afterwards.
    """

    vectors: int
    chunk: int
    sums: int


class _Change:
    """The parts of the edit."""

    def __init__(self, step: Step, head: FoundHead, begins: int) -> None:
        self._step, self._head, self._begins = step, head, begins
        assert step.profile is not None
        self._gone = tuple(family_tasks(step.profile, head))
        self._within = {*self._gone, head.loss}
        self._vanish = self._vanishing()
        self._gradients = [
            number
            for task in self._gone
            if step.tasks[task].phase == "backward"
            for number in step.made_by[task]
            if number not in self._vanish
        ]

    def early(self, *, unit: bool) -> Edit:
        """Gradients are made with the loss, and scaled in backward unless the loss's own is 1."""
        head, sizes = self._head, _sizes(self._head, self._weighs)
        made = self._made(head.loss)
        total = sum(block.bytes for block in made)
        rise = sizes.vectors + sizes.chunk + sizes.sums + total
        inserts = [Insert(head.loss, self._seconds, rise, total)]
        if not unit:
            inserts.append(Insert(self._begins, 0.0, total))
        return self._edit(made, inserts, head.loss + 1)

    def late(self) -> Edit:
        """The chunks' logits are made a second time when backward comes."""
        head, sizes = self._head, _sizes(self._head, self._weighs)
        lse = Block(head.number * _sums(head), head.loss, self._begins + 1)
        made = self._made(self._begins)
        total = sum(block.bytes for block in made)
        forward = Insert(head.loss, self._seconds, sizes.vectors + sizes.chunk, lse.bytes)
        seconds = self._seconds + self._step.tasks[head.product].seconds
        spared = _sums(head) * (2 * head.number + 3 * head.rows)
        rise = sizes.vectors + sizes.chunk + sizes.sums + total - spared
        again = Insert(self._begins, seconds, rise, total)
        return self._edit((lse, *made), (forward, again), self._begins + 1)

    @property
    def _seconds(self) -> float:
        return _CHUNK_SECONDS * -(-self._head.number // self._head.rows)

    @property
    def _weighs(self) -> bool:
        return len(self._step.operators[self._head.loss].inputs) > len(("logs", "target"))

    def _edit(self, blocks: Iterable[Block], inserts: Iterable[Insert], until: int) -> Edit:
        step, head = self._step, self._head
        saved = [pair for task in head.readers for pair in step.saved[task]]
        drops = [
            Drop(number, place)
            for number in self._vanish
            for place in range(len(step.tensors[number].holds))
        ]
        drops += [Drop(*pair) for pair in saved if pair[0] not in self._vanish]
        before = self._of_step_before()
        drops += [Drop(n, place) for n in before for place in range(len(step.tensors[n].holds))]
        needs = (Need(self._hidden, max(until, self._stood_for())), *self._read(until))
        claims = tuple(Span(task, task + 1) for task in head.readers)
        ends = [step.tensors[number].death for number in before]
        copies = (*self._shifted(), *(Block(self._of_hidden, 0, end) for end in ends))
        rises = tuple(Rise(task, 0) for task in self._gone)
        return Edit(tuple(drops), needs, (*blocks, *copies), tuple(inserts), rises, claims)

    def _vanishing(self) -> frozenset[int]:
        """The tensors that are not made any more: no gradient, and read by nothing else."""
        made = {n for task in self._gone for n in self._step.made_by[task]}
        for index, task in enumerate(self._step.tasks):
            if index not in self._within:
                made.difference_update(task.reads)
        return frozenset(n for n in made if self._step.tensors[n].kind != "gradient")

    def _made(self, at: int) -> tuple[Block, ...]:
        """The gradients from where they are made to where they were."""
        found = []
        for number in self._gradients:
            tensor = self._step.tensors[number]
            size = (
                min(tensor.bytes, self._of_hidden) if self._is_of_hidden(number) else tensor.bytes
            )
            found.append(Block(size, at, tensor.birth + 1))
        return tuple(found)

    @property
    def _of_hidden(self) -> int:
        return self._head.number * self._head.width * _BYTES[self._head.hidden.dtype]

    def _is_of_hidden(self, number: int) -> bool:
        task = self._step.operators[self._step.tensors[number].birth]
        return any(use.shape == self._head.hidden.shape for use in task.outputs)

    @property
    def _hidden(self) -> int:
        """The number of the hidden states: that of the step, where tensors may have become one."""
        inputs = self._step.operators[self._head.product].inputs
        place = list(dict.fromkeys(use.storage for use in inputs)).index(self._head.hidden.storage)
        return self._step.tasks[self._head.product].reads[place]

    def _read(self, until: int) -> tuple[Need, ...]:
        """What the loss takes: autocast's copies of weights too."""
        tasks = self._step.tasks
        reads = dict.fromkeys((*tasks[self._head.product].reads, *tasks[self._head.loss].reads))
        return tuple(Need(number, until) for number in reads if number not in self._vanish)

    def _stood_for(self) -> int:
        """Until when the logits have a placeholder: as long as a name was on them."""
        made = [n for n in self._vanish if self._step.tensors[n].birth < self._head.loss]
        ends = (h.until for n in made for h in self._step.tensors[n].holds if h.saver < 0)
        return max(ends, default=0)

    def _of_step_before(self) -> list[int]:
        """The logits that a name holds from the step before, where it will hold these after this one."""
        step, count = self._step, len(self._step.tasks)
        sizes = {
            step.tensors[number].bytes
            for number in step.made_by[self._head.product]
            if number in self._vanish and step.tensors[number].death >= count
        }
        held = [
            number
            for number, one in enumerate(step.tensors)
            if one.birth < 0 and one.bytes in sizes and one.kind == "input" and one.death < count
        ]
        read = {number for task in step.tasks for number in (*task.reads, *task.writes)}
        return [number for number in held if number not in read]

    def _shifted(self) -> tuple[Block, ...]:
        """The hidden states of the rows that a shift leaves."""
        shifted = self._head.number < self._head.hidden.shape[0] and self._head.copied
        if not shifted:
            return ()
        return (Block(self._of_hidden, self._head.copied[-1] + 1, self._stood_for()),)


def _sums(head: FoundHead) -> int:
    return max(_BYTES[head.hidden.dtype], _BYTES["float32"])


def _sizes(head: FoundHead, weighs: bool) -> _Sizes:
    own, sums = _BYTES[head.hidden.dtype], _sums(head)
    values = 5 if weighs else 4
    chunk = head.rows * head.classes * (own if own == sums else own + sums)
    matrix = head.classes * head.width
    narrow = 0 if own == sums else 2 * matrix * sums
    bias = head.classes * sums if head.biased else 0
    return _Sizes(
        head.number * (_INDEX + values * sums), chunk + head.rows * _PASSING * sums, narrow + bias
    )
