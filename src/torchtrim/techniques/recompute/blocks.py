"""The parts of a model that can run again in backward: modules, and ranges of a Sequential."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from torchtrim.step.index import index_of, joined_span
from torchtrim.step.simulate import simulate
from torchtrim.step.step import DEVICE, Call, Module, Span, Step

_LEAST_SHARE = 0.0005
_MOST_CUTS = 16
_GIVEN = ("activation", "temporary", "input")


class Block(NamedTuple):
    """A part of a model: `where` as a plan writes it, with the spans of its forward calls."""

    where: str
    spans: tuple[Span, ...]
    cut: tuple[str, int, int] | None = None


def blocks_of(step: Step) -> list[Block]:
    """The blocks that save at least half a thousandth of the peak and may run twice.

    A block may not run twice if something writes to its inputs between its forward and its backward, if it
    has user hooks, or if its code writes what cannot be put back. Of modules with the same operators the
    outermost is taken.
    """
    finder, index = _BlockFinder(step), index_of(step)
    blocks: dict[tuple[Span, ...], Block] = {}
    for number, module in enumerate(step.modules):
        calls = index.graded_calls[number]
        if not calls or number in index.runs_once:
            continue
        for block in (*finder.whole(module, calls), *finder.ranges(module, calls)):
            if block.spans not in blocks:
                blocks[block.spans] = block
    return list(blocks.values())


class _BlockFinder:
    def __init__(self, step: Step) -> None:
        self._step = step
        self._index = index_of(step)
        self._saved = self._saved_by_birth()
        self._backward = [max(step.backward.get(i, (-1,))) for i in range(len(step.tasks))]
        self._least = simulate(step).peak_bytes * _LEAST_SHARE

    def _saved_by_birth(self) -> list[int]:
        """Running sum of the bytes of activations by the task that made them."""
        born = [0] * len(self._step.tasks)
        for tensor in self._step.tensors:
            if tensor.kind == "activation" and tensor.birth >= 0 and tensor.pool == DEVICE:
                born[tensor.birth] += tensor.bytes
        return list(accumulate(born, initial=0))

    def whole(self, module: Module, calls: Sequence[Call]) -> Iterator[Block]:
        """The module itself, if it saves enough."""
        spans = tuple(call.span for call in calls)
        if self._worth(spans) and all(self._may_repeat(call, call.span) for call in calls):
            yield Block(module.path, spans)

    def ranges(self, module: Module, calls: Sequence[Call]) -> Iterator[Block]:
        """Ranges between the points at which a chain may be cut."""
        if not module.chain:
            return
        steps = [self._index.child_calls(call) for call in calls]
        if not all(step and all(one.graded for one in step) for step in steps):
            return
        cuts = _thin([i for i in range(len(steps[0]) + 1) if self._may_cut(steps, i)])
        for position, first in enumerate(cuts):
            for last in cuts[position + 1 :]:
                spans = tuple(joined_span(step[first:last]) for step in steps)
                if self._worth(spans) and all(
                    self._may_repeat(step[first], span)
                    for step, span in zip(steps, spans, strict=True)
                ):
                    cut = (module.path, first, last)
                    child = self._step.modules[steps[0][first].module].path
                    where = child if last - first == 1 else f"{module.path}[{first}:{last}]"
                    yield Block(where, spans, cut)

    def _may_cut(self, steps: Sequence[Sequence[Call]], index: int) -> bool:
        """A chain is cut at its ends, and where what passes is kept for backward anyway."""
        if index in (0, len(steps[0])):
            return True
        tensors = self._step.tensors
        return all(
            any(tensors[n].kind == "activation" for n in step[index - 1].outputs) for step in steps
        )

    def _may_repeat(self, call: Call, span: Span) -> bool:
        """Whether the call's inputs are still what they were when the span's backward comes."""
        ends = max(self._backward[span.first : span.last])
        return not any(
            span.first <= write < ends
            for tensor in call.inputs
            if self._step.tensors[tensor].kind in _GIVEN
            for write in self._index.writers.get(tensor, ())
        )

    def _worth(self, spans: tuple[Span, ...]) -> bool:
        return sum(self._saved[s.last] - self._saved[s.first] for s in spans) >= self._least


def _thin(cuts: list[int]) -> list[int]:
    """At most sixteen of the cuts, evenly spread."""
    if len(cuts) <= _MOST_CUTS:
        return cuts
    last = len(cuts) - 1
    return [cuts[round(i * last / (_MOST_CUTS - 1))] for i in range(_MOST_CUTS)]
