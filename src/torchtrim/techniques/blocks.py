"""The parts of a model that can run again in backward: modules, and ranges of a Sequential."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from torchtrim.records.profile import Call, Module, Profile
from torchtrim.techniques.base import Span

_LEAST_SHARE = 0.0005
_MOST_CUTS = 16


class Block(NamedTuple):
    """A part of a model: `where` as a plan writes it, with the spans of its forward calls."""

    where: str
    spans: tuple[Span, ...]
    cut: tuple[str, int, int] | None = None


def blocks_of(profile: Profile) -> list[Block]:
    """The blocks that save at least half a thousandth of the peak and may run twice.

    A block may not run twice if something writes to its inputs between its forward and its backward, or
    if hooks of the user's hang in it. Of modules with the same operators the outermost is taken.
    """
    reader = _Reader(profile)
    blocks: dict[tuple[Span, ...], Block] = {}
    for number, module in enumerate(profile.modules):
        calls = reader.calls[number]
        if not calls or reader.hooked(number):
            continue
        for block in (*reader.whole(module, calls), *reader.ranges(number, module, calls)):
            if block.spans not in blocks:
                blocks[block.spans] = block
    return list(blocks.values())


class _Reader:
    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self.calls: defaultdict[int, list[Call]] = defaultdict(list)
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        for call in profile.calls:
            if call.graded and call.last > call.first:
                self.calls[call.module].append(call)
        for number, module in enumerate(profile.modules):
            self._children[module.parent].append(number)
        self._writes: defaultdict[int, list[int]] = defaultdict(list)
        for index, op in enumerate(profile.operators):
            for storage in op.mutates:
                self._writes[storage].append(index)
        self._saved = self._saved_by_birth()
        self._backward = [-1] * len(profile.operators)
        for index, op in enumerate(profile.operators):
            if op.forward >= 0:
                self._backward[op.forward] = index
        self._least = profile.peak_bytes * _LEAST_SHARE

    def _saved_by_birth(self) -> list[int]:
        """Running sum of the bytes of activations by the operator that made them."""
        born = [0] * (len(self._profile.operators) + 1)
        for storage in self._profile.storages:
            if storage.kind == "activation" and storage.birth >= 0:
                born[storage.birth + 1] += storage.bytes
        for index in range(1, len(born)):
            born[index] += born[index - 1]
        return born

    def hooked(self, number: int) -> bool:
        """Whether the user's hooks hang in the module."""
        if self._profile.modules[number].hooked:
            return True
        return any(map(self.hooked, self._children[number]))

    def whole(self, module: Module, calls: list[Call]) -> Iterator[Block]:
        """The module itself, if it saves enough."""
        spans = tuple(Span(call.first, call.last) for call in calls)
        if self._worth(spans) and all(map(self._may_repeat, calls)):
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
                spans = tuple(Span(step[first].first, step[last - 1].last) for step in steps)
                if self._worth(spans) and all(
                    self._may_repeat(s[first], s[last - 1].last) for s in steps
                ):
                    cut = (module.path, first, last)
                    child = self._profile.modules[steps[0][first].module].path
                    where = child if last - first == 1 else f"{module.path}[{first}:{last}]"
                    yield Block(where, spans, cut)

    def _steps(self, number: int, call: Call) -> list[Call] | None:
        """The calls of the chain's children in one call of the chain, one for each child."""
        children = self._children[number]
        inside = [
            inner
            for child in children
            for inner in self.calls[child]
            if call.first <= inner.first and inner.last <= call.last
        ]
        inside.sort(key=lambda inner: (inner.first, inner.last))
        return inside if len(inside) == len(children) else None

    def _may_cut(self, steps: list[list[Call]], index: int) -> bool:
        """A chain is cut at its ends, and where what passes is kept for backward anyway."""
        if index in (0, len(steps[0])):
            return True
        storages = self._profile.storages
        return all(
            any(storages[s].kind == "activation" for s in step[index - 1].outputs) for step in steps
        )

    def _may_repeat(self, call: Call, last: int | None = None) -> bool:
        """Whether the call's inputs are still what they were when its backward comes."""
        storages = self._profile.storages
        ends = max(self._backward[call.first : last or call.last])
        return not any(
            call.first <= write < ends
            for storage in call.inputs
            if storages[storage].kind in ("activation", "temporary", "input")
            for write in self._writes[storage]
        )

    def _worth(self, spans: tuple[Span, ...]) -> bool:
        return sum(self._saved[s.last] - self._saved[s.first] for s in spans) >= self._least


def _thin(cuts: list[int]) -> list[int]:
    """At most sixteen of the cuts, evenly spread."""
    if len(cuts) <= _MOST_CUTS:
        return cuts
    last = len(cuts) - 1
    return [cuts[round(i * last / (_MOST_CUTS - 1))] for i in range(_MOST_CUTS)]
