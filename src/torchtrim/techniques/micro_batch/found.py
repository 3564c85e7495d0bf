"""Finds the modules of a step that may run in parts of the batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchtrim.records.operator_names import base_name
from torchtrim.records.profile import Operator
from torchtrim.step.index import index_of, joined_span
from torchtrim.step.step import DEVICE, Call, Span, Step

PARTS = (2, 4, 8, 16, 32, 64)
_LEAST_SHARE = 0.05
_MOST_PLACES = 8
_NORMS = tuple(
    f"aten::{name}"
    for name in (
        *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
        *("_native_batch_norm_legit", "_batch_norm_with_update"),
    )
)


class Split(NamedTuple):
    """A module or range with the spans of its calls, and the fewest samples that one was given."""

    where: str
    spans: tuple[Span, ...]
    size: int


def splits_of(step: Step) -> list[Split]:
    """The modules, and ranges of a Sequential, that take much for backward, those that take most first.

    That is what they keep, and what memory rises by besides in one task. A module may not be split that has
    a person's hooks, or BatchNorm over the samples, but what is between two of these may; what else
    mixes samples is seen when it is tried.
    """
    if step.profile is None or step.profile.world > 1:
        return []
    finder = _SplitFinder(step)
    found = [one for number in range(len(step.modules)) for one in finder.splits(number)]
    found.sort(key=lambda one: -one[0])
    distinct = {split.spans: split for _, split in found}
    return list(distinct.values())[:_MOST_PLACES]


class _SplitFinder:
    def __init__(self, step: Step) -> None:
        self._step = step
        self._index = index_of(step)
        self._bytes = sum(self._kept(Span(i, i + 1)) for i in range(len(step.tasks)))

    def splits(self, number: int) -> Iterator[tuple[int, Split]]:
        """The module, or ranges of it, each with the bytes that it takes."""
        calls = self._index.graded_calls[number]
        if not calls or number in self._index.runs_once:
            return
        path = self._step.modules[number].path
        if not any(takes_statistics(self._step, call.span) for call in calls):
            yield from self._split(path, [call.span for call in calls])
        elif self._step.modules[number].chain:
            for (first, last), spans in self._ranges(calls).items():
                yield from self._split(f"{path}[{first}:{last}]", spans)

    def _split(self, where: str, spans: list[Span]) -> Iterator[tuple[int, Split]]:
        taken = sum(map(self._kept, spans)) + max(map(self._rise, spans))
        size = min(batch_size(self._step, span) for span in spans)
        if size > 1 and taken > _LEAST_SHARE * self._bytes:
            yield taken, Split(where, tuple(spans), size)

    def _ranges(self, calls: Sequence[Call]) -> dict[tuple[int, int], list[Span]]:
        """The longest ranges of two children or more between those that take statistics; what begins one
        may not write to what it is given."""
        found: defaultdict[tuple[int, int], list[Span]] = defaultdict(list)
        for call in calls:
            inner = self._index.child_calls(call)
            for first, last in self._between(inner):
                found[first, last].append(joined_span(inner[first:last]))
        return {place: spans for place, spans in found.items() if len(spans) == len(calls)}

    def _between(self, inner: Sequence[Call]) -> Iterator[tuple[int, int]]:
        first = 0
        for last in range(len(inner) + 1):
            if last == len(inner) or takes_statistics(self._step, inner[last].span):
                while first < last and self._writes_input(inner[first]):
                    first += 1
                if last - first > 1:
                    yield first, last
                first = last + 1

    def _writes_input(self, call: Call) -> bool:
        wrote = {n for task in range(*call.span) for n in self._step.tasks[task].writes}
        return not wrote.isdisjoint(call.inputs)

    def _kept(self, span: Span) -> int:
        """Bytes of what the span makes and autograd saves."""
        made = (self._step.tensors[n] for i in range(*span) for n in self._step.made_by[i])
        return sum(t.bytes for t in made if t.kind == "activation" and t.pool == DEVICE)

    def _rise(self, span: Span) -> int:
        """The most that memory rises in one task of the span or of its backward."""
        tasks = [b for task in range(*span) for b in (task, *self._step.backward.get(task, ()))]
        return max(self._step.tasks[task].transient for task in tasks)


def takes_statistics(step: Step, span: Span) -> bool:
    """Whether a norm takes statistics over the batch there."""
    return any(map(is_training_norm, step.operators[span.first : span.last]))


def is_training_norm(op: Operator) -> bool:
    """Whether it takes statistics over the batch, which it then gives back."""
    if base_name(op.name) not in _NORMS:
        return False
    return len(op.outputs) > 1 and all(size > 0 for size in op.outputs[1].shape)


def batch_size(step: Step, span: Span) -> int:
    """The first dimension of the first tensor that the span is given; 0 for none."""
    given = given_to(step, span)
    for index in range(*span):
        for use in step.operators[index].inputs:
            if use.storage in given and use.shape:
                return use.shape[0]
    return 0


def given_to(step: Step, span: Span) -> frozenset[int]:
    """What goes into the calls of that span, or into the first in it where it is a range; parameters and the
    like left out."""
    assert step.profile is not None
    begun = [c for c in step.calls if c.span.first == span.first and c.span.last <= span.last]
    longest = max((call.span.last for call in begun), default=0)
    inputs = {n for call in begun if call.span.last == longest for n in call.inputs}
    kinds = ("parameter", "buffer", "optimizer_state", "gradient")
    return frozenset(n for n in inputs if step.profile.storages[n].kind not in kinds)
