"""Finds BatchNorms, and ranges that begin with one, with independent channels, and splits them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Literal, NamedTuple

from torchtrim.records.operator_names import base_name
from torchtrim.records.profile import Operator, Profile, TensorUse, strides_of
from torchtrim.records.remembered import remembered
from torchtrim.step.index import joined_span, recorded_index
from torchtrim.step.step import Span, Step, StepCall
from torchtrim.techniques.micro_batch.found import is_training_norm

NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")
_APART = frozenset(
    f"aten::{name}"
    for name in (
        *("relu", "relu_", "leaky_relu", "leaky_relu_", "hardtanh", "hardtanh_", "threshold"),
        *("threshold_", "max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d"),
        *("avg_pool3d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
        *("detach", "alias"),
    )
)
"""Operators that compute each channel's result from that channel only, with the same bits for any channel
count.

Functions that are computed in another way at the end of a row than within it are excluded.
"""
_BESIDE = ("aten::add_", "aten::empty")
"""Other operators of BatchNorm: it counts the batch, and allocates an empty tensor for other kernels."""
_COMPUTED = ("activation", "temporary")
_MOST_PLACES = 64  # Arbitrary; bounds the options of a step.
_LEAST_SHARE = 0.01  # Arbitrary; smaller inputs hardly affect the peak, beside the largest storage.


class ChannelRange(NamedTuple):
    """A place in a plan's notation, with the spans of its calls."""

    where: str
    spans: tuple[Span, ...]
    overwrites: bool


def places_of(step: Step) -> tuple[ChannelRange, ...]:
    """Return the places, those with the largest inputs first."""
    return _places_of(step.profile) if step.profile is not None else ()


def parts_of(step: Step, span: Span, parts: int) -> int:
    """Return how many parts of the largest part's size the channels have, if `parts` are requested."""
    ops = step.operators[span.first : span.last]
    given = next(op for op in ops if is_training_norm(op)).inputs[0]
    layout = layout_of(given.shape, given.strides)
    assert layout is not None
    spans = spans_of(given.shape[1], layout, parts)
    return given.shape[1] // max(end - first for first, end in spans)


@remembered
def _places_of(profile: Profile) -> tuple[ChannelRange, ...]:
    finder = _ChannelFinder(profile)
    found = [one for number in range(len(profile.modules)) for one in finder.places(number)]
    found.sort(key=lambda one: -one[0])
    return tuple(place for _, place in found[:_MOST_PLACES])


class _ChannelFinder:
    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._index = recorded_index(profile)
        self._least = max((s.bytes for s in profile.storages), default=0) * _LEAST_SHARE

    def places(self, number: int) -> Iterator[tuple[int, ChannelRange]]:
        """Yield places with the bytes of their inputs: norms and ranges of a chain that begin with one.

        A norm alone is a place only if its gradient may overwrite its input.
        """
        module, calls = self._profile.modules[number], self._index.running_calls[number]
        if calls and all(call.graded for call in calls):
            if module.type in NORMS:
                yield from self._place(module.path, [(call,) for call in calls])
            if module.chain:
                yield from self._ranges(module.path, calls)

    def _ranges(self, path: str, calls: Sequence[StepCall]) -> Iterator[tuple[int, ChannelRange]]:
        turns = [self._turns(call) for call in calls]
        if any(not turn for turn in turns):
            return
        for first, call in enumerate(turns[0]):
            if self._profile.modules[call.module].type not in NORMS:
                continue
            last = first + 1
            while last < len(turns[0]) and all(self._follows(turn[last]) for turn in turns):
                last += 1
                spans = [turn[first:last] for turn in turns]
                yield from self._place(f"{path}[{first}:{last}]", spans)

    def _turns(self, call: StepCall) -> tuple[StepCall, ...]:
        """Return the calls of a chain's children within one of its calls, if they ran in order."""
        inner = self._index.child_calls(call)
        order = tuple(one.module for one in inner)
        return inner if order == self._index.children[call.module] else ()

    def _place(
        self, where: str, calls: Sequence[tuple[StepCall, ...]]
    ) -> Iterator[tuple[int, ChannelRange]]:
        if not all(map(self._keeps_apart, calls)):
            return
        overwrites = all(map(self._may_overwrite, calls))
        spans = tuple(map(joined_span, calls))
        size = sum(self._profile.storages[turn[0].inputs[0]].bytes for turn in calls)
        if (overwrites or len(calls[0]) > 1) and size >= self._least:
            yield size, ChannelRange(where, spans, overwrites)

    def _follows(self, call: StepCall) -> bool:
        """Return True if a child of a chain treats each channel of its input independently."""
        module = self._profile.modules[call.module]
        ops = self._profile.operators[call.span.first : call.span.last]
        inner = {op.module for op in ops}
        return (
            not module.hooked
            and call.graded
            and len(call.outputs) == 1
            and inner <= {call.module}
            and all(base_name(op.name) in _APART and op.phase == "forward" for op in ops)
        )

    def _keeps_apart(self, turn: Sequence[StepCall]) -> bool:
        """Return True if a norm computes statistics over a batch of layers with contiguous channels."""
        norm = turn[0]
        ops = self._profile.operators[norm.span.first : norm.span.last]
        norms = [op for op in ops if is_training_norm(op)]
        if self._profile.modules[norm.module].hooked or len(norm.inputs) != 1 or len(norms) != 1:
            return False
        if not all(op in norms or _is_beside(op) for op in ops):
            return False
        given, made = norms[0].inputs[0], norms[0].outputs[0]
        storages = self._profile.storages
        whole = storages[given.storage].bytes == storages[made.storage].bytes
        return given.storage == norm.inputs[0] and whole and _has_channels(given)

    def _may_overwrite(self, turn: Sequence[StepCall]) -> bool:
        """Return True if only the norm's backward, which runs once, reads the input from then on."""
        number, norm = turn[0].inputs[0], range(*turn[0].span)
        storage = self._profile.storages[number]
        computed = storage.birth >= 0 and storage.kind in _COMPUTED
        if not computed or number in self._index.hooked_tensors:
            return False
        operators, readers = self._profile.operators, self._index.readers.get(number, ())
        own = [index for index in readers if operators[index].forward in norm]
        once = len(own) == 1 and storage.death <= own[0] + 1
        return once and max(readers) == own[0]


def _is_beside(op: Operator) -> bool:
    uses = (*op.inputs, *op.outputs)
    return base_name(op.name) in _BESIDE and all(prod(use.shape) <= 1 for use in uses)


def _has_channels(use: TensorUse) -> bool:
    """Return True if a tensor is contiguous or channels last, with positions after the channels."""
    _batch, *inner = use.shape
    if len(inner) < len(("channels", "places")) or inner[0] < 2 or prod(inner[1:]) < 2:
        return False
    return layout_of(use.shape, use.strides) is not None


Layout = Literal["contiguous", "channels last"]
_WITH_LAST = (4, 5)
"""torch supports channels last for these numbers of dimensions."""
_TOGETHER = 32
"""Adjacent channels are computed in groups of at most this size: a part consists of whole groups."""


def spans_of(count: int, layout: Layout, parts: int) -> tuple[tuple[int, int], ...]:
    """Return the first channel and the end of each part; with channels last, of whole groups.

    No part has a single channel, since that would be laid out both ways.
    """
    size = max(-(-count // parts), 2)
    if layout == "channels last":
        size = -(-size // _TOGETHER) * _TOGETHER
    ends = [*range(size, count - 1, size), count]
    return tuple(zip([0, *ends], ends, strict=False))


def layout_of(shape: Sequence[int], strides: Sequence[int]) -> Layout | None:
    """Return the layout of a tensor with these strides, in elements, or None for another than torch's own.

    A dimension of size one has its stride too: kernels depend on it.
    """
    batch, channels, *places = range(len(shape))
    if tuple(strides) == strides_of(shape, (batch, channels, *places)):
        return "contiguous"
    last = len(shape) in _WITH_LAST and strides_of(shape, (batch, *places, channels))
    return "channels last" if tuple(strides) == last else None
