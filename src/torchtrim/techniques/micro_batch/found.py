"""Finds the modules of a step that may run in parts of the batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchtrim.records.operator_names import base_name
from torchtrim.records.profile import Operator
from torchtrim.step.index import index_of, joined_span
from torchtrim.step.step import DEVICE, Span, Step, StepCall

PARTS = (2, 4, 8, 16, 32, 64)
_LEAST_SHARE = 0.05  # Arbitrary: splitting a smaller share of the step's bytes gains little.
_MOST_PLACES = 8  # Arbitrary: each place has six options, which the planner must price.
_NORMS = tuple(
    f"aten::{name}"
    for name in (
        *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
        *("_native_batch_norm_legit", "_batch_norm_with_update"),
    )
)

_PRODUCTS = frozenset(("aten::mm", "aten::addmm", "aten::_sparse_addmm", "aten::_sparse_mm"))
_INDICES = ("int32", "int64")


class Split(NamedTuple):
    """A module or range with the spans of its calls, and the smallest batch among them."""

    where: str
    spans: tuple[Span, ...]
    size: int


def splits_of(step: Step) -> list[Split]:
    """Return the modules and ranges of a Sequential that hold most memory for backward, largest first.

    Counts the bytes they keep and the highest rise in one task. A module with user hooks, with BatchNorm
    over the samples, with products by a sparse matrix, or that writes its buffers, may not be split, but the
    range between two of these may. Other operations that mix samples are detected at the first batch.
    """
    if step.profile is None or step.profile.world > 1:
        return []
    finder = _SplitFinder(step)
    sized = [one for number in range(len(step.modules)) for one in finder.splits(number)]
    sized.sort(key=lambda one: -one[0])
    distinct = {split.spans: split for _, split in sized}
    return list(distinct.values())[:_MOST_PLACES]


class _SplitFinder:
    def __init__(self, step: Step) -> None:
        self._step = step
        self._index = index_of(step)
        self._bytes = sum(self._kept(Span(i, i + 1)) for i in range(len(step.tasks)))

    def splits(self, number: int) -> Iterator[tuple[int, Split]]:
        calls = self._index.graded_calls[number]
        # A hook on all modules would be given a part instead of the batch.
        whole = number in self._index.runs_once or self._step.modules[number].hooked_with_all
        if not calls or whole:
            return
        path = self._step.modules[number].path
        if not any(self._is_whole(call.span) for call in calls):
            yield from self._split(path, [call.span for call in calls])
        elif self._step.modules[number].chain:
            for (first, last), spans in self._ranges(calls).items():
                yield from self._split(f"{path}[{first}:{last}]", spans)

    def _split(self, where: str, spans: list[Span]) -> Iterator[tuple[int, Split]]:
        taken = sum(map(self._kept, spans)) + max(map(self._rise, spans))
        size = min(batch_size(self._step, span) for span in spans)
        if size > 1 and taken > _LEAST_SHARE * self._bytes:
            yield taken, Split(where, tuple(spans), size)

    def _ranges(self, calls: Sequence[StepCall]) -> dict[tuple[int, int], list[Span]]:
        """Return the longest ranges of two or more children without batch statistics, with their calls.

        The first child of a range may not write to its input.
        """
        found: defaultdict[tuple[int, int], list[Span]] = defaultdict(list)
        for call in calls:
            inner = self._index.child_calls(call)
            for first, last in self._between(inner):
                found[first, last].append(joined_span(inner[first:last]))
        return {place: spans for place, spans in found.items() if len(spans) == len(calls)}

    def _between(self, inner: Sequence[StepCall]) -> Iterator[tuple[int, int]]:
        first = 0
        for last in range(len(inner) + 1):
            if last == len(inner) or self._is_whole(inner[last].span):
                while first < last and self._writes_input(inner[first]):
                    first += 1
                if last - first > 1:
                    yield first, last
                first = last + 1

    def _is_whole(self, span: Span) -> bool:
        if any(map(is_sparse_product, self._step.operators[span.first : span.last])):
            return True
        wrote = {n for task in range(*span) for n in self._step.tasks[task].writes}
        writes = any(self._step.tensors[number].kind == "buffer" for number in wrote)
        return writes or takes_statistics(self._step, span)

    def _writes_input(self, call: StepCall) -> bool:
        wrote = {n for task in range(*call.span) for n in self._step.tasks[task].writes}
        return not wrote.isdisjoint(call.inputs)

    def _kept(self, span: Span) -> int:
        made = (self._step.tensors[n] for i in range(*span) for n in self._step.made_by[i])
        return sum(t.bytes for t in made if t.kind == "activation" and t.pool == DEVICE)

    def _rise(self, span: Span) -> int:
        tasks = [b for task in range(*span) for b in (task, *self._step.backward.get(task, ()))]
        return max(self._step.tasks[task].transient for task in tasks)


def takes_statistics(step: Step, span: Span) -> bool:
    """Return True if a norm in the span takes statistics over the batch."""
    return any(map(is_training_norm, step.operators[span.first : span.last]))


def is_training_norm(op: Operator) -> bool:
    """Return True if the norm takes statistics over the batch, which are then among its outputs."""
    if base_name(op.name) not in _NORMS:
        return False
    return len(op.outputs) > 1 and all(size > 0 for size in op.outputs[1].shape)


def is_sparse_product(op: Operator) -> bool:
    """Return True for a product with a sparse matrix, whose indices are among its inputs."""
    return base_name(op.name) in _PRODUCTS and any(use.dtype in _INDICES for use in op.inputs)


def batch_size(step: Step, span: Span) -> int:
    """Return the first dimension of the span's first input tensor, or 0."""
    given = given_to(step, span)
    for index in range(*span):
        for use in step.operators[index].inputs:
            if use.storage in given and use.shape:
                return use.shape[0]
    return 0


def given_to(step: Step, span: Span) -> frozenset[int]:
    """Return the inputs of the span's calls, or of a range's first call, without state."""
    assert step.profile is not None
    begun = [c for c in step.calls if c.span.first == span.first and c.span.last <= span.last]
    longest = max((call.span.last for call in begun), default=0)
    inputs = {n for call in begun if call.span.last == longest for n in call.inputs}
    kinds = ("parameter", "buffer", "optimizer_state", "gradient")
    return frozenset(n for n in inputs if step.profile.storages[n].kind not in kinds)
