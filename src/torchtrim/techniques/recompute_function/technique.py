"""Recompute function: drop what a function of the script saves for backward, and rerun the function there.

For code outside of modules, such as a renderer, an embedding of coordinates, or a loss: the same as to wrap
the function in `torch.utils.checkpoint`, without an edit of the script. Modules that the function calls
rerun with it, such as a network between an embedding and a renderer.

`where` names a root and a function of a module of the script, which changes when the root first runs:
`Field:render.composite` is `composite` of render.py, and `Field:__main__.composite` that of the script
itself. Every call with gradients enabled reruns. The function must be at the top level of its file; nested
functions, methods and generators are left alone, and so are functions that write globals, files, or lists
(other than by `append`), that call modules with buffers or hooks, or whose inputs are written before
backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchtrim.executor.registry import Handle, Option, Roots, TechniqueUnit
from torchtrim.records.plan import Technique
from torchtrim.records.profile import STATE, Function, Profile
from torchtrim.step.edits import Block, Edit
from torchtrim.step.index import index_of
from torchtrim.step.rerun import rerun
from torchtrim.step.simulate import simulate
from torchtrim.step.step import DEVICE, Span, Step, Tensor

_FORWARD = ("forward", "other", "loader")
_LEAST_SHARE = 0.0005  # Arbitrary: smaller functions save too little to be worth an option.


class RecomputeFunction(TechniqueUnit):
    """`where` holds places such as `Net:render.composite`."""

    name = "recompute_function"
    does = "rerun a function of the script in backward instead of keeping activations"
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
        """Return every function that saves something for backward, and may run twice."""
        if step.profile is None or not step.profile.functions:
            return ()
        root = next((c.module for c in step.calls if step.modules[c.module].parent < 0), -1)
        if root < 0:
            return ()
        finder = _FunctionFinder(step, step.profile)
        return [
            Option(self.name, f"{step.modules[root].path}:{function.name}", spans)
            for function in step.profile.functions
            if (spans := finder.spans(function))
        ]

    def edits(self, step: Step, option: Option) -> Edit | None:
        """Rerun the function's calls."""
        edit = rerun(step, option.spans)
        return _of_cut_call(step, option.spans, edit) if edit is not None else None

    def apply(self, roots: Roots, technique: Technique) -> Handle:
        """Make the named functions rerun in backward."""
        from torchtrim.executor.failing import tell
        from torchtrim.techniques.recompute_function.running import rerun_functions

        return rerun_functions(technique.where, tell)


TECHNIQUE = RecomputeFunction()


def _of_cut_call(step: Step, spans: Sequence[Span], edit: Edit) -> Edit:
    """Return the edit with what a call made before the step began, which the rerun makes again.

    A step begins where its first root does. Tensors that a call made before are at the
    end of the recording, as if made for the next step.
    """
    head, tail = spans[0], spans[-1]
    if head.first or tail.last < len(step.tasks) or not edit.inserts:
        return edit
    ends = {need.tensor: need.until for need in edit.needs}
    sizes = {one.bytes for one in _left_by(step, tail)}
    made = [n for n in _saved_in(step, head) if n in ends and step.tensors[n].bytes in sizes]
    if not made:
        return edit
    rerun_at, *others = edit.inserts
    size, last = sum(step.tensors[n].bytes for n in made), max(ends[n] for n in made)
    given = sum(step.tensors[n].bytes for n in _read_by(step, tail))
    again = (Block(step.tensors[n].bytes, rerun_at.at, ends[n]) for n in made)
    rerun_at = rerun_at._replace(rise=rerun_at.rise + size, makes=rerun_at.makes + size)
    return edit._replace(
        needs=tuple(need for need in edit.needs if need.tensor not in made),
        blocks=(*edit.blocks, *again, Block(given, 0, last)),
        inserts=(rerun_at, *others),
    )


def _left_by(step: Step, tail: Span) -> Iterator[Tensor]:
    """Yield the tensors of a span that live on after the step."""
    for task in range(*tail):
        every = (step.tensors[n] for n in step.made_by[task])
        yield from (one for one in every if one.death >= len(step.tasks))


def _saved_in(step: Step, span: Span) -> list[int]:
    """Return the tensors from before the step that a span saves, and only it reads in forward."""
    users = index_of(step).users
    saved = dict.fromkeys(n for task in range(*span) for n, _ in step.saved[task])
    return [
        number
        for number in saved
        if step.tensors[number].birth < 0 and step.tensors[number].kind == "input"
        if all(task < span.last or step.tasks[task].of >= 0 for task in users[number])
    ]


def _read_by(step: Step, span: Span) -> set[int]:
    """Return the tensors that a span reads from before it."""
    reads = {number for task in range(*span) for number in step.tasks[task].reads}
    every = ((number, step.tensors[number]) for number in reads)
    return {n for n, one in every if one.birth < span.first and one.kind not in STATE}


class _FunctionFinder:
    def __init__(self, step: Step, profile: Profile) -> None:
        self._step = step
        self._profile = profile
        self._writers = index_of(step).writers
        self._least = simulate(step).peak_bytes * _LEAST_SHARE
        modules = step.modules
        owners = {s.name.rpartition(".")[0] for s in profile.storages if s.kind == "buffer"}
        self._kept = [
            call.span
            for call in step.calls
            if modules[call.module].never_reruns or modules[call.module].path in owners
        ]
        self._whole = {call.span for call in step.calls}

    def spans(self, function: Function) -> tuple[Span, ...]:
        """Return the spans of a function's calls with gradients, or none if it is not worth a rerun."""
        spans = tuple(Span(c.first, c.last) for c in function.calls if c.graded)
        # A module's own forward is a place of recompute.
        lasts = function.writes and not function.appends
        if lasts or not spans or self._whole.issuperset(spans):
            return ()
        may = self._saved(spans) >= self._least and all(map(self._may_repeat, spans))
        return spans if may else ()

    def _saved(self, spans: Sequence[Span]) -> int:
        tensors, made_by = self._step.tensors, self._step.made_by
        made = (tensors[n] for span in spans for task in range(*span) for n in made_by[task])
        return sum(one.bytes for one in made if one.kind == "activation" and one.pool == DEVICE)

    def _may_repeat(self, span: Span) -> bool:
        """Return True for forward code without state, whose inputs are unchanged in its backward."""
        tasks = self._step.tasks[span.first : span.last]
        if any(task.phase not in _FORWARD for task in tasks):
            return False
        if any(span.first <= kept.first < span.last for kept in self._kept):
            return False
        ends = max(max(self._step.backward.get(task, (-1,))) for task in range(*span))
        return not any(
            span.first <= write < ends
            for task in tasks
            for number in task.reads
            if self._is_given(number, span)
            for write in self._writers.get(number, ())
        )

    def _is_given(self, number: int, span: Span) -> bool:
        tensor = self._step.tensors[number]
        return tensor.birth < span.first and tensor.kind not in STATE
