"""Micro-batch: run a module in parts of the batch, so that activations of only one part exist at a time.

Forward runs the parts without gradients and joins their results. In backward each part reruns with gradients,
followed at once by its own backward with its rows of the result's gradient; parameter gradients accumulate
over the parts. Code outside the module, such as the loss, sees the whole batch, so losses need no rescaling.
The cost is one more forward of the module, and more, smaller kernels.

A loss inside the module is divided by the divisor of the whole batch's mean: the number of labels other than
`ignore_index`, or the sum of their class weights, not the number of samples. The same holds for full means. A
scalar that is neither a sum nor such a mean is refused. Each part draws the dropout masks of all samples and
takes its rows, so each sample gets the mask it would have had.

At the first batch the module is tried on some samples, on the same with half of them replaced, and on the
halves. It is refused, by name, if it mixes samples (BatchNorm in training, losses that compare samples),
changes buffers in forward, leaves tensors on modules, has results that cannot be joined, has hooks that
would see each part, or is given what no part can have a copy of, such as an iterator. A call that writes to
its arguments runs as a whole. Evaluation without gradients is unchanged. `torch.autograd.grad`,
`backward(inputs=...)` and `create_graph` are refused.

Samples are along the first dimension of the first input tensor; if these mix, as the time steps of a sequence
do, along the second. `where` names modules (`Net.blocks.3`) and ranges of a Sequential (`Net.layers[2:6]`),
such as the range between two BatchNorms. Option `parts`: number of parts, 2 or more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from math import prod

from torchtrim.errors import ApplyFailed
from torchtrim.executor.places import wrong_options
from torchtrim.executor.registry import Handle, Option, Roots, TechniqueUnit, all_or_none
from torchtrim.executor.row_edits import left_before
from torchtrim.records.operator_names import base_name
from torchtrim.records.plan import Technique
from torchtrim.records.profile import STATE, Operator
from torchtrim.step.edits import Block, Drop, Edit, Insert, Need, Rise, drops_of, joined
from torchtrim.step.index import index_of, passes_of
from torchtrim.step.step import DEVICE, Span, Step
from torchtrim.techniques.micro_batch.found import PARTS, batch_size, given_to, splits_of


class MicroBatch(TechniqueUnit):
    """`where` names modules and ranges of a Sequential that run in `parts` parts of the batch."""

    name = "micro_batch"
    does = "run in parts of the batch"
    takes = ("parts",)
    equivalence = "ROUNDING"
    assumes = ("rerun blocks have no hooks, and write only state that can be restored",)
    unseen = (
        "code that reruns writes no file, environment variable or extension state out of its source's sight",
        "nothing writes through `.data` between forward and backward",
    )

    def options(self, step: Step) -> Sequence[Option]:
        """Return every module with a batch that holds much for backward, in 2, 4, 8 parts and so on."""
        return [
            Option(self.name, split.where, split.spans, None, (("parts", parts),))
            for split in splits_of(step)
            for parts in PARTS
            if parts <= split.size
        ]

    def edits(self, step: Step, option: Option) -> Edit | None:
        """Run the parts instead of the whole batch. None if the span has no backward."""
        parts = int(dict(option.settings)["parts"])
        changes = [_PartsEdit(step, span, parts) for span in option.spans]
        edits = [change.edit() for change in changes if change.passes]
        return joined(edits) if edits else None

    def apply(self, roots: Roots, technique: Technique) -> Handle:
        """Make the named modules run in parts. If it raises `ApplyFailed`, the model is unchanged."""
        from torchtrim.capture.build import rank_and_world
        from torchtrim.techniques.micro_batch.running import in_parts

        parts = technique.options.get("parts")
        if type(parts) is not int or parts < 2 or len(technique.options) > 1:
            raise wrong_options(technique, "one option, `parts`, 2 or more")
        if rank_and_world()[1] > 1:
            raise ApplyFailed(
                "micro_batch accumulates gradients over parts, but several processes exchange them "
                "only once. Take it out of the plan, and give each process a smaller batch."
            )
        return all_or_none(technique.where, lambda where: in_parts(roots, where, parts))


TECHNIQUE = MicroBatch()


_FIRST_MATRIX = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
_SECONDS_AN_OPERATOR = 1e-5  # Arbitrary: the order of one kernel launch.
_SECONDS_A_PART = 5e-4  # Arbitrary: generators, autocast and slicing, for each part.
_SECONDS_WATCHED = 1e-5  # Time to check one operator for random numbers.


class _PartsEdit:
    """Builds the edit. `passes`: the tasks of each backward through the span."""

    def __init__(self, step: Step, span: Span, parts: int) -> None:
        self._step = step
        self._span = span
        self._parts = parts
        self.passes = passes_of(step, span)
        size = batch_size(step, span)
        most = -(-size // parts)
        self._share = most / size
        self._sizes = {most, (size - 1) % most + 1}
        self._tasks = (*range(*span), *(task for tasks in self.passes for task in tasks))

    def edit(self) -> Edit:
        """Run forward without gradients, then each part's forward and backward where a backward starts."""
        span = self._span
        leaving = self._early(self._leaving, span.first)
        out = sum(block.bytes for block in leaving)
        state, ends = self._step.overhead.random_state, self.passes[-1][-1] + 1
        before = int(out * self._share) if self._share <= 1 / 2 else 0
        # The result of a whole part before is still there.
        forward = self._rise(range(*span)) + before + out
        inserts = [Insert(span.first, self._first_seconds, forward, out)]
        blocks = [*leaving, Block(state, span.first, ends)]
        for tasks in self.passes:
            gradients = self._early(self._gradients_of(tasks), tasks[0])
            grads = sum(block.bytes for block in gradients)
            rise = state + self._rise(range(*span), tasks) + grads
            inserts.append(Insert(tasks[0], self._seconds(tasks), rise, grads))
            blocks += gradients
        return Edit(
            drops=tuple(self._drops()),
            needs=tuple(self._needs()),
            blocks=tuple(blocks),
            inserts=tuple(inserts),
            rises=tuple(Rise(task, 0) for task in self._tasks),
            claims=(span, *(Span(tasks[0], tasks[-1] + 1) for tasks in self.passes)),
        )

    @cached_property
    def _made(self) -> list[int]:
        return [n for task in self._tasks for n in self._step.made_by[task]]

    @cached_property
    def _inside(self) -> frozenset[int]:
        return frozenset(self._tasks)

    @cached_property
    def _read_outside(self) -> frozenset[int]:
        """Tensors made here that other tasks use, or that the span's calls return."""
        inside, index = self._inside, index_of(self._step)
        used = (index.readers, index.writers)
        found = {n for c in self._step.calls if c.span == self._span for n in c.outputs}
        found.update(
            n for n in self._made if any(not inside.issuperset(tasks.get(n, ())) for tasks in used)
        )
        return frozenset(found)

    @property
    def _leaving(self) -> list[int]:
        made = (n for task in range(*self._span) for n in self._step.made_by[task])
        return [n for n in made if n in self._read_outside]

    def _gradients_of(self, tasks: Sequence[int]) -> list[int]:
        made = (n for task in tasks for n in self._step.made_by[task])
        tensors, outside = self._step.tensors, self._read_outside - self._added
        return [n for n in made if n in outside or tensors[n].kind == "gradient"]

    @property
    def _added(self) -> frozenset[int]:
        """Gradients that each part adds to an earlier pass's or call's."""
        return index_of(self._step).added

    def _early(self, numbers: Iterable[int], at: int) -> list[Block]:
        """Return blocks for results, allocated from the first part on."""
        tensors = (self._step.tensors[number] for number in numbers)
        return [Block(one.bytes, at, one.birth + 1) for one in tensors if one.pool == DEVICE]

    def _drops(self) -> Iterator[Drop]:
        stays, made = {*self._leaving}, set(self._made)
        stays.update(n for tasks in self.passes for n in self._gradients_of(tasks))
        yield from drops_of(self._step, (number for number in self._made if number not in stays))
        for task in range(*self._span):
            for number, hold in self._step.saved[task]:
                if number in stays or number not in made:
                    yield Drop(number, hold)

    def _needs(self) -> Iterator[Need]:
        """Keep the inputs that parts are cut from: the span's, and in each pass the arriving gradients."""
        for tasks in self.passes:
            read = {n for task in tasks for n in self._step.tasks[task].reads}
            for number in self._needed:
                if number in read or self._step.tensors[number].birth < self._span.last:
                    yield Need(number, tasks[-1] + 1)

    @cached_property
    def _needed(self) -> list[int]:
        """The span's inputs, and the gradients of its results."""
        made = set(self._made)
        read = {n for task in self._tasks for n in self._step.tasks[task].reads}
        read |= given_to(self._step, self._span)
        return sorted(
            n
            for n in read - made - set(self._leaving)
            if self._step.tensors[n].kind not in STATE and self._step.tensors[n].pool == DEVICE
        )

    @cached_property
    def _of_batch(self) -> frozenset[int]:
        """Tensors that depend on samples, such as the gradients of results, except those of parameters."""
        found = {*given_to(self._step, self._span), *self._read_outside & set(self._made)}
        tensors, last = self._step.tensors, self._span.last
        found.update(n for n in self._needed if tensors[n].birth >= last)
        for task in self._tasks:
            if any(n in found for n in self._step.tasks[task].reads):
                found.update(self._step.tasks[task].makes)
        found -= self._added | self._summed
        return frozenset(n for n in found if tensors[n].kind not in STATE)

    @cached_property
    def _summed(self) -> frozenset[int]:
        """Gradients of one use of a parameter that has several in a call, which autograd adds up."""
        found = {n for n in self._made if self._step.tensors[n].kind == "gradient"} | self._added
        for task in map(self._step.tasks.__getitem__, reversed(self._tasks)):
            if base_name(task.name) == _ADD and not found.isdisjoint(task.makes):
                found.update(task.reads)
        return frozenset(found)

    def _size(self, number: int) -> int:
        tensor = self._step.tensors[number]
        if tensor.pool != DEVICE:
            return 0
        return int(tensor.bytes * self._share) if number in self._of_batch else tensor.bytes

    def _transient(self, index: int) -> int:
        step = self._step
        task = step.tasks[index]
        if step.operators[index].random:
            drawn = sum(step.tensors[n].bytes for n in task.makes)
            return max(task.transient, drawn) + self._beside(index, drawn)
        made = step.made_by[index]
        own = sum(step.tensors[n].bytes for n in made if step.tensors[n].pool == DEVICE)
        return sum(map(self._size, made)) + self._scratch(index, max(task.transient - own, 0))

    def _beside(self, index: int, drawn: int) -> int:
        """Return what is alive beside numbers drawn for all samples: a model tensor, the part's own."""
        task, made = self._step.tasks[index], self._step.made_by[index]
        is_like = base_name(task.name).endswith("_like") and self._of_batch.issuperset(made)
        return drawn + sum(map(self._size, made)) if is_like else 0

    def _scratch(self, index: int, scratch: int) -> int:
        """Return a part's scratch: less what shrinks with the samples."""
        operator = self._step.operators[index]
        shrinking = min(self._shrinking(operator, scratch), scratch)
        return self._unfolded(operator, scratch - int(shrinking * (1 - self._share)))

    def _shrinking(self, operator: Operator, scratch: int) -> int:
        """Return the scratch bytes that belong to samples.

        A matrix product packs its first operand whole, the second by blocks. Attention has buffers for each
        thread, and copies the arriving gradient.
        """
        name, tensors = base_name(operator.name), self._step.tensors
        first = _FIRST_MATRIX.get(name)
        if first is not None and operator.inputs[first].storage in self._of_batch:
            return tensors[operator.inputs[first].storage].bytes
        if name == f"{_ATTENTION}_backward":
            return tensors[operator.outputs[0].storage].bytes
        by_threads = name == _ATTENTION and operator.inputs[0].dtype == "float32"
        return 0 if by_threads else scratch

    def _unfolded(self, operator: Operator, scratch: int) -> int:
        """Return a part's scratch if a part of one sample may have another kernel than the batch."""
        assert self._step.profile is not None
        own = unfolded_bytes(operator) if self._step.profile.device == "cpu" else None
        if own is None or 1 not in self._sizes:
            return scratch
        return own if self._sizes == {1} else max(own, scratch)

    def _rise(self, forward: Iterable[int], backward: Sequence[int] = ()) -> int:
        step = self._step
        level = rise = 0
        ends: defaultdict[int, int] = defaultdict(int)
        for index in (*forward, *backward):
            for at in [at for at in ends if at <= index]:
                level -= ends.pop(at)
            rise = max(rise, level + self._transient(index))
            for number in step.made_by[index]:
                size = self._size(number)
                level += size
                ends[max(self._until(number, backward), index + 1)] += size
        return rise

    def _until(self, number: int, backward: Sequence[int]) -> int:
        tensor = self._step.tensors[number]
        if tensor.kind == "gradient" or number in self._added:
            return tensor.birth + 1
        ends = (
            left_before(self._step, hold, backward) if backward else hold.until
            for hold in tensor.holds
            if hold.saver < 0 or (backward and hold.saver in self._inside)
        )
        return max(ends, default=tensor.birth + 1)

    @cached_property
    def _first_seconds(self) -> float:
        more, span = self._parts - 1, range(*self._span)
        watched = self._parts * len(span) * _SECONDS_WATCHED if self._drawn else 0.0
        return watched + more * (len(span) * _SECONDS_AN_OPERATOR + _SECONDS_A_PART + self._drawn)

    def _seconds(self, backward: Sequence[int]) -> float:
        own = sum(self._step.tasks[i].seconds for i in range(*self._span))
        more = (self._parts - 1) * len(backward) * _SECONDS_AN_OPERATOR
        return own + self._first_seconds + self._drawn + more

    @cached_property
    def _drawn(self) -> float:
        """The seconds of operators that draw random numbers."""
        step = self._step
        return sum(step.tasks[i].seconds for i in range(*self._span) if step.operators[i].random)


_ADD = "aten::add"
_CONVOLUTIONS = {"aten::convolution": 0, "aten::convolution_backward": 1}
"""Where their input is among their tensors; the weights follow."""
_MOST_ELEMENTS, _MOST_WIDTH, _ITEM = 20_480, 3, 4
"""Of one sample and of a kernel, where oneDNN leaves one sample in float32 to torch (`use_mkldnn` in
Convolution.cpp).
"""


def unfolded_bytes(operator: Operator) -> int | None:
    """Return the scratch of a convolution of one sample by torch's own kernel, None if that is not used.

    It unfolds the input into a matrix with a column for each place; oneDNN computes larger batches without.
    """
    at = _CONVOLUTIONS.get(base_name(operator.name))
    if at is None:
        return None
    given, weight = operator.inputs[at : at + 2]
    (entering, *places), (leaving, *kernel) = given.shape[1:], weight.shape[1:]
    made = (operator.inputs[0] if at else operator.outputs[0]).shape
    if given.dtype != "float32" or prod(given.shape[1:4]) > _MOST_ELEMENTS or prod(kernel) == 1:
        return None
    if len(kernel) > 1 and min(kernel[-2:]) > _MOST_WIDTH:
        return None
    if weight.shape[:2] == (entering, made[1]) and (
        entering != made[1] or made[2:] > tuple(places)
    ):
        return _ITEM * prod(weight.shape[1:]) * prod(places)  # transposed
    return _ITEM * prod(weight.shape[1:]) * prod(made[2:]) if leaving == entering else None
