"""Chunked loss: linear layer and cross entropy on chunks of rows, without materializing the logits.

A head passes its logits to `cross_entropy`. PyTorch then holds the logits, their log-softmax and two
gradients, each rows times classes. Here the head returns a stand-in. Views, shifts, transposes and casts of
it apply to the hidden states, and `cross_entropy` (or `log_softmax` and `nll_loss`, as function or module)
iterates over chunks of rows: it computes a chunk's logits, its loss and the gradients of hidden states and
weight, and discards the logits. Backward scales these gradients. If each row has its own gradient
(`reduction="none"`), or in float16, backward recomputes the logits instead.

Label smoothing, class weights, `ignore_index`, all reductions, a bias, tied weights and autocast behave as in
PyTorch; sums are in float32. If anything else reads the logits (a metric, the model's caller, a loss of
probabilities) they are computed then and kept. `logsumexp`, the basis of a z-loss, is chunked too. Reading
them after the weights have changed is refused, since they can no longer be computed. Evaluation without
gradients is unchanged.

`where` names the linear layer, or the module whose forward computes the product. Options: `rows` per chunk;
`classes`, which identifies the product if the module is not a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtrim.errors import ApplyFailed
from torchtrim.executor.places import module_at
from torchtrim.executor.registry import Handle, Handles, Option
from torchtrim.records.finding import Equivalence
from torchtrim.records.operator_names import base_name
from torchtrim.records.plan import Technique
from torchtrim.step.edits import Block, Drop, Edit, Insert, Need, Rise, joined
from torchtrim.step.step import Span, Step
from torchtrim.techniques.chunked_loss.found import FoundHead, family_tasks, gradient_of, heads_of

if TYPE_CHECKING:
    from torch import nn


Forward = Callable[..., Any]
_OPTIONS = ("rows", "classes")


class ChunkedLoss:
    """`where` holds the paths of heads: linear layers, or modules that compute the product themselves."""

    name = "chunked_loss"
    takes = _OPTIONS
    equivalence: Equivalence = "ROUNDING"

    def options(self, step: Step) -> Sequence[Option]:
        """Return every module whose logits only cross entropy reads."""
        found: dict[str, Option] = {}
        for head in heads_of(step):
            spans = found[head.where].spans if head.where in found else ()
            settings = (("rows", head.rows), ("classes", head.classes))
            found[head.where] = Option(self.name, head.where, (*spans, head.span), None, settings)
        return tuple(found.values())

    def edits(self, step: Step, option: Option) -> Edit | None:
        """Replace the tasks that compute or read logits by chunks."""
        mine = (edit_of(step, head) for head in heads_of(step) if head.where == option.where)
        edits = [edit for edit in mine if edit is not None]
        return joined(edits) if edits else None

    def apply(self, roots: Mapping[str, nn.Module], technique: Technique) -> Handle:
        """Give the named modules lazy logits. If it raises `ApplyFailed`, the model is unchanged."""
        from torchtrim.techniques.chunked_loss.replace import replaced

        rows, classes = (_number(technique, name) for name in _OPTIONS)
        handles = Handles()
        try:
            for where in technique.where:
                handles.add(replaced(module_at(roots, where), where, rows, classes))
        except BaseException:
            handles.revert()
            raise
        return handles


TECHNIQUE = ChunkedLoss()


def _number(technique: Technique, name: str) -> int:
    unknown = sorted(set(technique.options) - set(_OPTIONS))
    if unknown:
        raise ApplyFailed(
            f"chunked_loss has no option {unknown[0]!r}; it has {', '.join(_OPTIONS)}."
        )
    number = technique.options.get(name, 0)
    if type(number) is not int or number < 0:
        raise ApplyFailed(
            f"chunked_loss: {name} must be a number, or 0 to choose one, not {number!r}."
        )
    return number


_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_INDEX = 8  # Bytes of an int64 target.
_PASSING = 9
"""Temporaries of a chunk for each of its rows, in values of the accumulation dtype."""
_CHUNK_SECONDS = 1e-4  # Arbitrary: about ten kernel launches of 10 us.


def edit_of(step: Step, head: FoundHead) -> Edit | None:
    """Return the edit for chunks instead of full logits, or None without a backward."""
    assert step.profile is not None
    begins, maker = gradient_of(step.profile, head)
    if begins < 0 or head.hidden.dtype not in _BYTES:
        return None
    unit = maker is not None and base_name(maker.name) == "aten::ones_like"
    unit = unit and step.profile.device.startswith("cpu")
    late = head.each or head.hidden.dtype == "float16"
    change = _ChunkEdit(step, head, begins)
    return change.late() if late else change.early(unit=unit)


class _Sizes(NamedTuple):
    """Bytes of `vectors`, a few values per row, and of `chunk`, the buffers of one chunk.

    `sums`: size of the gradients' accumulation dtype relative to their own.
    """

    vectors: int
    chunk: int
    sums: int


class _ChunkEdit:
    """Builds the edit."""

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
        """Compute gradients with the loss, and scale them in backward unless the loss's gradient is 1."""
        head, sizes = self._head, _sizes(self._head, self._weighs)
        made = self._made(head.loss)
        total = sum(block.bytes for block in made)
        rise = sizes.vectors + sizes.chunk + sizes.sums + total
        inserts = [Insert(head.loss, self._seconds, rise, total)]
        if not unit:
            inserts.append(Insert(self._begins, 0.0, total))
        return self._edit(made, inserts, head.loss + 1)

    def late(self) -> Edit:
        """Recompute the chunks' logits in backward."""
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
        """Tensors that no longer exist: not gradients, and not read elsewhere."""
        made = {n for task in self._gone for n in self._step.made_by[task]}
        for index, task in enumerate(self._step.tasks):
            if index not in self._within:
                made.difference_update(task.reads)
        return frozenset(n for n in made if self._step.tensors[n].kind != "gradient")

    def _made(self, at: int) -> tuple[Block, ...]:
        """Return the gradients, from their new to their former allocation."""
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
        """Index of the hidden states in the step, where tensors may have been merged."""
        inputs = self._step.operators[self._head.product].inputs
        place = list(dict.fromkeys(use.storage for use in inputs)).index(self._head.hidden.storage)
        return self._step.tasks[self._head.product].reads[place]

    def _read(self, until: int) -> tuple[Need, ...]:
        """Return the inputs of the loss, including autocast's copies of weights."""
        tasks = self._step.tasks
        reads = dict.fromkeys((*tasks[self._head.product].reads, *tasks[self._head.loss].reads))
        return tuple(Need(number, until) for number in reads if number not in self._vanish)

    def _stood_for(self) -> int:
        """Return the end of the stand-in's life: as long as a variable held the logits."""
        made = [n for n in self._vanish if self._step.tensors[n].birth < self._head.loss]
        ends = (h.until for n in made for h in self._step.tensors[n].holds if h.saver < 0)
        return max(ends, default=0)

    def _of_step_before(self) -> list[int]:
        """Return the previous step's logits, if a variable holds them during this step."""
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
        """Return the hidden rows that remain after a shift."""
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
