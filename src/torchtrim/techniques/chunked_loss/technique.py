"""Chunked loss: linear layer and cross entropy on chunks of rows, without materializing the logits.

A head passes its logits to `cross_entropy`. PyTorch then holds the logits, their log-softmax and two
gradients, each rows times classes. Here the head returns a stand-in. Views, shifts, transposes and casts of
it apply to the hidden states. `cross_entropy` (or `log_softmax` and `nll_loss`, as function or module, or
`log_softmax` and a `gather` of one class a row) iterates over chunks of rows: it computes a chunk's logits,
its loss and the gradients of hidden states and weight, and discards the logits. Backward scales these
gradients. If each row has its own gradient (`reduction="none"`, `gather`), or in float16, backward recomputes
the logits instead.

Label smoothing, class weights, `ignore_index`, all reductions, a bias, tied weights and autocast behave as in
PyTorch; sums are in float32. If anything else reads the logits (a metric, the model's caller, a loss of
probabilities) they are computed then and kept, which is refused once the weights have changed. `logsumexp`,
the basis of a z-loss, is chunked too. Evaluation without gradients is unchanged.

`where` names the linear layer, or the module whose forward computes the product. Options: `rows` per chunk;
`classes`, which identifies the product if the module is not a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torchtrim.executor.places import module_at, wrong_options
from torchtrim.executor.registry import Handle, Option, Roots, TechniqueUnit, all_or_none
from torchtrim.records.operator_names import base_name
from torchtrim.records.plan import Technique
from torchtrim.step.edits import Block, Drop, Edit, Insert, Need, Rise, drops_of, joined
from torchtrim.step.step import Span, Step
from torchtrim.techniques.chunked_loss.found import FoundHead, family_tasks, gradient_of, heads_of

Forward = Callable[..., Any]
_OPTIONS = ("rows", "classes")


class ChunkedLoss(TechniqueUnit):
    """`where` holds the paths of heads: linear layers, or modules that compute the product themselves."""

    name = "chunked_loss"
    does = "compute logits and loss in chunks of rows"
    takes = _OPTIONS
    equivalence = "ROUNDING"
    assumes = (
        "no backward hooks around the head",
        "weights stay the same until the loss reads the logits",
    )
    unseen = ("nothing writes through `.data` between forward and backward",)

    def options(self, step: Step) -> Sequence[Option]:
        """Return every module whose logits only cross entropy reads."""
        options: dict[str, Option] = {}
        for head in heads_of(step):
            spans = options[head.where].spans if head.where in options else ()
            settings = (("rows", head.rows), ("classes", head.classes))
            options[head.where] = Option(self.name, head.where, (*spans, head.span), None, settings)
        return tuple(options.values())

    def edits(self, step: Step, option: Option) -> Edit | None:
        """Replace the tasks that compute or read logits by chunks."""
        mine = (edit_of(step, head) for head in heads_of(step) if head.where == option.where)
        edits = [edit for edit in mine if edit is not None]
        return joined(edits) if edits else None

    def apply(self, roots: Roots, technique: Technique) -> Handle:
        """Give the named modules lazy logits. If it raises `ApplyFailed`, the model is unchanged."""
        from torchtrim.techniques.chunked_loss.replace import replaced

        rows, classes = (technique.options.get(name, 0) for name in _OPTIONS)
        if type(rows) is not int or type(classes) is not int or min(rows, classes) < 0:
            raise wrong_options(technique, "the options `rows` and `classes`, 0 or more")

        def change(where: str) -> Handle:
            module_at(roots, where)
            name, _, path = where.partition(".")
            return replaced(roots[name], path, where, rows, classes)

        return all_or_none(technique.where, change)


TECHNIQUE = ChunkedLoss()


_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_INDEX = 8  # Bytes of an int64 target.
_PASSING = 9  # Temporaries for each row of a chunk, in values of the accumulation dtype.
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
    """Bytes of a few values per row, of one chunk's buffers, and of gradients in the accumulation dtype."""

    vectors: int
    chunk: int
    sums: int


class _ChunkEdit:
    def __init__(self, step: Step, head: FoundHead, begins: int) -> None:
        self._step, self._head, self._begins = step, head, begins
        assert step.profile is not None
        self._gone = tuple(family_tasks(step.profile, head))
        self._within = {*self._gone, head.loss}
        self._vanish = self._vanishing()
        backward = (task for task in self._gone if step.tasks[task].phase == "backward")
        made = (number for task in backward for number in step.made_by[task])
        self._gradients = [number for number in made if number not in self._vanish]

    def early(self, *, unit: bool) -> Edit:
        """Compute gradients with the loss, and scale them in backward unless the loss's gradient is 1."""
        head, sizes = self._head, self._sizes()
        made = self._made(head.loss)
        total = sum(block.bytes for block in made)
        rise = sizes.vectors + sizes.chunk + sizes.sums + total
        inserts = [Insert(head.loss, self._seconds, rise, total)]
        if not unit:
            inserts.append(Insert(self._begins, 0.0, total))
        return self._edit(made, inserts, head.loss + 1)

    def late(self) -> Edit:
        head, sizes = self._head, self._sizes()
        sums = max(_BYTES[head.hidden.dtype], _BYTES["float32"])
        lse = Block(head.number * sums, head.loss, self._begins + 1)
        made = self._made(self._begins)
        total = sum(block.bytes for block in made)
        forward = Insert(head.loss, self._seconds, sizes.vectors + sizes.chunk, lse.bytes)
        seconds = self._seconds + self._step.tasks[head.product].seconds
        spared = sums * (2 * head.number + 3 * head.rows)
        rise = sizes.vectors + sizes.chunk + sizes.sums + total - spared
        again = Insert(self._begins, seconds, rise, total)
        return self._edit((lse, *made), (forward, again), self._begins + 1)

    @property
    def _seconds(self) -> float:
        return _CHUNK_SECONDS * -(-self._head.number // self._head.rows)

    def _sizes(self) -> _Sizes:
        head, own = self._head, _BYTES[self._head.hidden.dtype]
        sums = max(own, _BYTES["float32"])
        weighs = len(self._step.operators[head.loss].inputs) > 2
        chunk = head.rows * head.classes * (own if own == sums else own + sums)
        narrow = 0 if own == sums else 2 * head.classes * head.width * sums
        vectors = head.number * (_INDEX + (5 if weighs else 4) * sums)
        bias = head.classes * sums if head.biased else 0
        return _Sizes(vectors, chunk + head.rows * _PASSING * sums, narrow + bias)

    def _edit(self, blocks: Iterable[Block], inserts: Iterable[Insert], until: int) -> Edit:
        step, head = self._step, self._head
        saved = [pair for task in head.readers for pair in step.saved[task]]
        before = self._of_step_before()
        drops = (
            *drops_of(step, self._vanish),
            *(Drop(*pair) for pair in saved if pair[0] not in self._vanish),
            *drops_of(step, before),
        )
        stood = max(until, self._stood_for())
        given = (Need(number, stood) for number in (self._hidden, *self._copied_from()))
        needs = (*given, *self._read(until))
        claims = tuple(Span(task, task + 1) for task in head.readers)
        ends = [step.tensors[number].death for number in before]
        copies = (*self._shifted(), *(Block(self._of_hidden, 0, end) for end in ends))
        rises = tuple(Rise(task, 0) for task in self._gone)
        return Edit(drops, needs, (*blocks, *copies), tuple(inserts), rises, claims)

    def _vanishing(self) -> frozenset[int]:
        made = {n for task in self._gone for n in self._step.made_by[task]}
        for index, task in enumerate(self._step.tasks):
            if index not in self._within:
                made.difference_update(task.reads)
        return frozenset(n for n in made if self._step.tensors[n].kind != "gradient")

    def _made(self, at: int) -> tuple[Block, ...]:
        """Return the gradients, from their new to their former allocation."""
        blocks = []
        for tensor in (self._step.tensors[number] for number in self._gradients):
            made = self._step.operators[tensor.birth].outputs
            of_hidden = any(use.shape == self._head.hidden.shape for use in made)
            size = min(tensor.bytes, self._of_hidden) if of_hidden else tensor.bytes
            blocks.append(Block(size, at, tensor.birth + 1))
        return tuple(blocks)

    @property
    def _of_hidden(self) -> int:
        return self._head.number * self._head.width * _BYTES[self._head.hidden.dtype]

    @property
    def _hidden(self) -> int:
        inputs = self._step.operators[self._head.product].inputs
        place = list(dict.fromkeys(use.storage for use in inputs)).index(self._head.hidden.storage)
        return self._step.tasks[self._head.product].reads[place]

    def _copied_from(self) -> tuple[int, ...]:
        """Return the input that the head itself copies, which the stand-in keeps: one not contiguous."""
        step, maker = self._step, self._step.tensors[self._hidden].birth
        if maker < 0 or base_name(step.tasks[maker].name) != "aten::clone":
            return ()
        own = step.operators[maker].module == step.operators[self._head.product].module
        return step.tasks[maker].reads if own else ()

    def _read(self, until: int) -> tuple[Need, ...]:
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
        read = {number for task in step.tasks for number in (*task.reads, *task.writes)}
        return [
            number
            for number, one in enumerate(step.tensors)
            if one.birth < 0 and one.bytes in sizes and one.kind == "input" and one.death < count
            if number not in read
        ]

    def _shifted(self) -> tuple[Block, ...]:
        copied = self._head.copied
        if not copied or self._head.number >= self._head.hidden.shape[0]:
            return ()
        return (Block(self._of_hidden, copied[-1] + 1, self._stood_for()),)
