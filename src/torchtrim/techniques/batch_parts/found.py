"""Finds the modules of a step that may run in parts of the batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from torchtrim.memory.names import base_name
from torchtrim.records.profile import Operator, Profile
from torchtrim.step.step import DEVICE, Call, Span, Step

PARTS = (2, 4, 8, 16, 32, 64)
_LEAST_SHARE = 0.05
_MOST_MODULES = 4
_NORMS = tuple(
    f"aten::{name}"
    for name in (
        *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
        *("_native_batch_norm_legit", "_batch_norm_with_update"),
    )
)


class Split(NamedTuple):
    """A module with the spans of its calls, and the fewest samples that one was given."""

    where: str
    spans: tuple[Span, ...]
    size: int


def splits_of(step: Step) -> list[Split]:
    """The modules that keep a part of the peak for backward, those that keep most first.

    A module may not be split that has hooks of the user's, or BatchNorm over the samples; what else mixes
    samples is seen when it is tried.
    """
    if step.profile is None or step.profile.world > 1:
        return []
    reader = _Reader(step, step.profile)
    found = [one for number in range(len(step.modules)) for one in reader.split(number)]
    found.sort(key=lambda one: -one[0])
    return [split for _, split in found[:_MOST_MODULES]]


class _Reader:
    def __init__(self, step: Step, profile: Profile) -> None:
        self._step = step
        self._profile = profile
        self._calls: defaultdict[int, list[Call]] = defaultdict(list)
        for call in step.calls:
            if call.span.last > call.span.first:
                self._calls[call.module].append(call)
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        for number, module in enumerate(step.modules):
            self._children[module.parent].append(number)
        self._bytes = sum(self._kept(Span(i, i + 1)) for i in range(len(step.tasks)))

    def split(self, number: int) -> Iterator[tuple[int, Split]]:
        """The module, with the bytes that it keeps."""
        calls = [call for call in self._calls[number] if call.graded]
        if not calls or self._hooked(number) or any(self._mixes(call.span) for call in calls):
            return
        kept = sum(self._kept(call.span) for call in calls)
        size = min(batch_size(self._step, call.span) for call in calls)
        if size > 1 and kept > _LEAST_SHARE * self._bytes:
            yield (
                kept,
                Split(self._step.modules[number].path, tuple(call.span for call in calls), size),
            )

    def _kept(self, span: Span) -> int:
        """Bytes of what the span makes and autograd saves."""
        made = (self._step.tensors[n] for i in range(*span) for n in self._step.made_by[i])
        return sum(t.bytes for t in made if t.kind == "activation" and t.pool == DEVICE)

    def _hooked(self, number: int) -> bool:
        if self._step.modules[number].hooked:
            return True
        return any(map(self._hooked, self._children[number]))

    def _mixes(self, span: Span) -> bool:
        return takes_statistics(self._step, span)


def takes_statistics(step: Step, span: Span) -> bool:
    """Whether a norm takes statistics over the batch there."""
    operators = step.profile.operators if step.profile is not None else ()
    return any(is_training_norm(operators[i]) for i in range(*span) if operators)


def is_training_norm(op: Operator) -> bool:
    """Whether it takes statistics over the batch, which it then gives back."""
    if base_name(op.name) not in _NORMS:
        return False
    return len(op.outputs) > 1 and all(size > 0 for size in op.outputs[1].shape)


def batch_size(step: Step, span: Span) -> int:
    """The first dimension of the first tensor that the span is given; 0 for none."""
    assert step.profile is not None
    given = given_to(step, span)
    for index in range(*span):
        for use in step.profile.operators[index].inputs:
            if use.storage in given and use.shape:
                return use.shape[0]
    return 0


def given_to(step: Step, span: Span) -> frozenset[int]:
    """What goes into the calls of that span, parameters and the like left out."""
    assert step.profile is not None
    inputs = {n for call in step.calls if call.span == span for n in call.inputs}
    kinds = ("parameter", "buffer", "optimizer_state", "gradient")
    return frozenset(n for n in inputs if step.profile.storages[n].kind not in kinds)
