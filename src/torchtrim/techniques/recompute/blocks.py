"""The parts of a model that can run again in backward: modules, and ranges of a Sequential."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

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
    reader = _Reader(step)
    blocks: dict[tuple[Span, ...], Block] = {}
    for number, module in enumerate(step.modules):
        calls = reader.calls[number]
        if not calls or reader.runs_once(number):
            continue
        for block in (*reader.whole(module, calls), *reader.ranges(number, module, calls)):
            if block.spans not in blocks:
                blocks[block.spans] = block
    return list(blocks.values())


class _Reader:
    def __init__(self, step: Step) -> None:
        self._step = step
        self.calls: defaultdict[int, list[Call]] = defaultdict(list)
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        for call in step.calls:
            if call.graded and call.span.last > call.span.first:
                self.calls[call.module].append(call)
        for number, module in enumerate(step.modules):
            self._children[module.parent].append(number)
        self._writes: defaultdict[int, list[int]] = defaultdict(list)
        for index, task in enumerate(step.tasks):
            for tensor in task.writes:
                self._writes[tensor].append(index)
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

    def runs_once(self, number: int) -> bool:
        """Whether the module, or one in it, has user hooks or writes what cannot be put back."""
        if self._step.modules[number].runs_once:
            return True
        return any(map(self.runs_once, self._children[number]))

    def whole(self, module: Module, calls: list[Call]) -> Iterator[Block]:
        """The module itself, if it saves enough."""
        spans = tuple(call.span for call in calls)
        if self._worth(spans) and all(self._may_repeat(call, call.span) for call in calls):
            yield Block(module.path, spans)

    def ranges(self, number: int, module: Module, calls: list[Call]) -> Iterator[Block]:
        """Ranges between the points at which a chain may be cut."""
        if not module.chain:
            return
        steps = [step for call in calls if (step := self._steps(number, call)) is not None]
        if len(steps) != len(calls) or len({len(step) for step in steps}) != 1:
            return
        cuts = _thin([i for i in range(len(steps[0]) + 1) if self._may_cut(steps, i)])
        for position, first in enumerate(cuts):
            for last in cuts[position + 1 :]:
                spans = tuple(_span(step, first, last) for step in steps)
                if self._worth(spans) and all(
                    self._may_repeat(step[first], span)
                    for step, span in zip(steps, spans, strict=True)
                ):
                    cut = (module.path, first, last)
                    child = self._step.modules[steps[0][first].module].path
                    where = child if last - first == 1 else f"{module.path}[{first}:{last}]"
                    yield Block(where, spans, cut)

    def _steps(self, number: int, call: Call) -> list[Call] | None:
        """The calls of the chain's children in one call of the chain, one for each child."""
        children = self._children[number]
        inside = [
            inner
            for child in children
            for inner in self.calls[child]
            if call.span.first <= inner.span.first and inner.span.last <= call.span.last
        ]
        inside.sort(key=lambda inner: inner.span)
        return inside if len(inside) == len(children) else None

    def _may_cut(self, steps: list[list[Call]], index: int) -> bool:
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
            for write in self._writes[tensor]
        )

    def _worth(self, spans: tuple[Span, ...]) -> bool:
        return sum(self._saved[s.last] - self._saved[s.first] for s in spans) >= self._least


def _span(calls: list[Call], first: int, last: int) -> Span:
    return Span(calls[first].span.first, calls[last - 1].span.last)


def _thin(cuts: list[int]) -> list[int]:
    """At most sixteen of the cuts, evenly spread."""
    if len(cuts) <= _MOST_CUTS:
        return cuts
    last = len(cuts) - 1
    return [cuts[round(i * last / (_MOST_CUTS - 1))] for i in range(_MOST_CUTS)]
