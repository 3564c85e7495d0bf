"""Recompute: drop the saved tensors of a block, and rerun the block in backward.

The method is from Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), selected per block
here; `techniques.recompute.rerun` implements it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from torchtrim.executor.registry import Handle, Option, Plain, Roots, TechniqueUnit
from torchtrim.records.plan import Technique
from torchtrim.step.edits import Edit
from torchtrim.step.index import index_of, joined_span
from torchtrim.step.rerun import rerun
from torchtrim.step.simulate import simulate
from torchtrim.step.step import DEVICE, Span, Step, StepCall, StepModule


class Recompute(TechniqueUnit):
    """`where` holds module paths (`Net.blocks.3`) and ranges of a Sequential (`Net.layers[2:6]`)."""

    name = "recompute"
    does = "rerun in backward instead of keeping activations"
    equivalence = "BITWISE"
    assumes = (
        "rerun blocks have no hooks, and write only state that can be restored",
        "weights stay the same between forward and backward",
    )
    unseen = (
        "code that reruns writes no file, environment variable or extension state out of its source's sight",
        "nothing writes through `.data` between forward and backward",
    )

    def options(self, step: Step) -> Sequence[Option]:
        """Return every block and every range of a chain that saves something for backward."""
        return [Option(self.name, *block) for block in blocks_of(step)]

    def refusals(self, step: Step) -> Iterator[str]:
        """Return messages about modules whose code must not rerun, grouped by line."""
        writers: dict[str, list[str]] = {}
        for module in step.modules:
            if module.writes and not module.appends:
                writers.setdefault(module.writes, []).append(module.path)
        for writes, paths in writers.items():
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            yield (
                f"recompute cannot apply to `{paths[0]}`{more}: {writes}, and a rerun would repeat "
                "that"
            )

    def edits(self, step: Step, option: Option) -> Edit | None:
        """Rerun the block's calls."""
        return rerun(step, option.spans)

    def apply(self, roots: Roots, technique: Technique) -> Handle:
        """Make the named modules rerun in backward."""
        from torchtrim.executor.failing import tell
        from torchtrim.techniques.recompute.rerun import rerun_places

        return rerun_places(roots, technique.where, tell)

    def export(self) -> Plain:
        """Return the function that applies the technique in exported code."""
        return Plain("torchtrim.techniques.recompute.rerun", "rerun_places")


TECHNIQUE = Recompute()


_LEAST_SHARE = 0.0005  # Arbitrary: smaller blocks save too little to be worth an option.
_MOST_CUTS = 16  # Arbitrary: ranges between cuts grow with their square.
_GIVEN = ("activation", "temporary", "input")


class ModuleBlock(NamedTuple):
    """A part of a model: its name in a plan, and the spans of its forward calls."""

    where: str
    spans: tuple[Span, ...]
    cut: tuple[str, int, int] | None = None


def blocks_of(step: Step) -> list[ModuleBlock]:
    """Return the blocks that save at least 0.05 % of the peak and may rerun.

    A block may not rerun if something writes to its inputs between its forward and its backward, if it has
    user hooks, or if its code has side effects that cannot be undone. Of modules with the same operators the
    outermost counts.
    """
    finder, index = _BlockFinder(step), index_of(step)
    blocks: dict[tuple[Span, ...], ModuleBlock] = {}
    for number, module in enumerate(step.modules):
        calls = index.graded_calls[number]
        if not calls or number in index.never_reruns:
            continue
        for block in (*finder.whole(module, calls), *finder.ranges(module, calls)):
            if block.spans not in blocks:
                blocks[block.spans] = block
    return list(blocks.values())


class _BlockFinder:
    def __init__(self, step: Step) -> None:
        self._step = step
        self._index = index_of(step)
        saved = [0] * len(step.tasks)
        for tensor in step.tensors:
            if tensor.kind == "activation" and tensor.birth >= 0 and tensor.pool == DEVICE:
                saved[tensor.birth] += tensor.bytes
        self._saved = list(accumulate(saved, initial=0))  # By the task that allocates them.
        self._backward = [max(step.backward.get(i, (-1,))) for i in range(len(step.tasks))]
        self._least = simulate(step).peak_bytes * _LEAST_SHARE

    def whole(self, module: StepModule, calls: Sequence[StepCall]) -> Iterator[ModuleBlock]:
        """Yield the module itself if it saves enough."""
        spans = tuple(call.span for call in calls)
        if self._worth(spans) and all(self._may_repeat(call, call.span) for call in calls):
            yield ModuleBlock(module.path, spans)

    def ranges(self, module: StepModule, calls: Sequence[StepCall]) -> Iterator[ModuleBlock]:
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
                    yield ModuleBlock(where, spans, cut)

    def _may_cut(self, steps: Sequence[Sequence[StepCall]], index: int) -> bool:
        """Return True at the ends of a chain, and if backward needs the value there anyway.

        A call whose graph is thrown away, such as a generator's for its discriminator, has no backward.
        """
        tensors = self._step.tensors
        return index in (0, len(steps[0])) or all(
            any(tensors[n].kind == "activation" for n in step[index - 1].outputs)
            for step in steps
            if self._ends(joined_span(tuple(step))) >= 0
        )

    def _may_repeat(self, call: StepCall, span: Span) -> bool:
        """Return True if the call's inputs are unchanged when the span's backward starts."""
        ends = self._ends(span)
        return not any(
            span.first <= write < ends
            for tensor in call.inputs
            if self._step.tensors[tensor].kind in _GIVEN
            for write in self._index.writers.get(tensor, ())
        )

    def _worth(self, spans: tuple[Span, ...]) -> bool:
        return sum(self._saved[s.last] - self._saved[s.first] for s in spans) >= self._least

    def _ends(self, span: Span) -> int:
        """Return the last task of the span's backward, or -1 if it has none."""
        return max(self._backward[span.first : span.last])


def _thin(cuts: list[int]) -> list[int]:
    """Return at most `_MOST_CUTS` of the cuts, evenly spaced."""
    if len(cuts) <= _MOST_CUTS:
        return cuts
    last = len(cuts) - 1
    return [cuts[round(i * last / (_MOST_CUTS - 1))] for i in range(_MOST_CUTS)]
