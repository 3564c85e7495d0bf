"""Forward of a module in parts of the batch, and its rerun, part by part, in backward."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from torchtrim.errors import ApplyFailed
from torchtrim.executor.arguments import GivenArguments, held, is_same
from torchtrim.executor.block_state import BlockState
from torchtrim.executor.chains import Range, Ranges
from torchtrim.executor.failing import note
from torchtrim.executor.ordinals import Counting, passed, unnumbered
from torchtrim.executor.places import part_at
from torchtrim.executor.registry import Handle
from torchtrim.executor.swap import Swapped
from torchtrim.techniques.micro_batch.draws import Draws
from torchtrim.techniques.micro_batch.inputs import Ambient, CallArguments
from torchtrim.techniques.micro_batch.losses import Losses
from torchtrim.techniques.micro_batch.rows import (
    SampleLayout,
    SampleRows,
    filled,
    leaves_of,
    order_of,
    parts_of,
)
from torchtrim.techniques.micro_batch.study import SAME, SUM, Study, StudyResult, has_gradient_hooks

Forward = Callable[..., Any]
Tensors = Sequence[torch.Tensor]
Gradients = list[torch.Tensor | None]
_Kind = tuple[Any, ...]


class InParts:
    """Runs a module's forward in parts of the batch if gradients are needed."""

    def __init__(self, where: str, module: nn.Module, parts: int) -> None:
        self._where = where
        self._module = module
        self._parts = parts
        self._state = BlockState([module], where)
        self._known: dict[_Kind, _Studies] = {}
        self._whole: dict[_Kind, str] = {}

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the whole batch."""
        given = CallArguments.of(args, kwargs)
        if not torch.is_grad_enabled() or not self._is_graded(given):
            return forward(*args, **kwargs)
        if given.size < 2:
            self._expect_tensors(given)
            return forward(*args, **kwargs)
        why = self._state.why_once() or self._why_whole() or self._why_not_given(args, kwargs)
        kind = self._kind(given)
        if not (why := why or self._whole.get(kind, "")):
            try:
                return self._result(forward, given, kind)
            except _NotInParts as found:
                why = self._whole[kind] = str(found)
            except Exception as error:
                note(error, self._where)
                raise
        self._state.says_once(why)
        return forward(*args, **kwargs)

    def _expect_tensors(self, given: CallArguments) -> None:
        """Refuse a first call without tensors in sight, as with a generator: none would run in parts."""
        if given.tensors or self._known:
            return
        raise self._refused(
            "it is called without a tensor, a list or a dict of tensors, whose rows parts could take. Pass "
            "tensors instead of what makes them."
        )

    def _why_not_given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return why the arguments do not serve several parts; raise in the first call."""
        why = GivenArguments((args, kwargs), self._state.owned).why_once
        if why and not self._known:
            raise self._refused(f"{why}.")
        return why

    def _refused(self, why: str) -> ApplyFailed:
        error = ApplyFailed(f"`{self._where}` cannot run in parts of the batch: {why}")
        note(error, self._where)
        return error

    def _result(self, forward: Forward, given: CallArguments, kind: _Kind) -> Any:
        """Return the whole batch's result from parts. If it raises `_NotInParts`, state is restored."""
        with unnumbered():
            if kind not in self._known:
                study = self._studied_late if self._known else self._studied
                self._known[kind] = _Studies(study(forward, given))
            studies = self._known[kind]
            others: Counter[str] | None = None
            try:
                result = self._run(forward, given, studies)
            except _OtherOperators as found:
                others = found.operators
            # Not in the handler, whose exception keeps what the part has made.
            if others is not None:
                studies.choose(others, lambda: self._studied_late(forward, given))
                result = self._run(forward, given, studies)
        passed(studies.facts.operators)
        return result

    def _run(self, forward: Forward, given: CallArguments, studies: _Studies) -> Any:
        if studies.facts.second:
            given = given.transposed
        run = _PartedRun(self._state, forward, given, studies, self._parts)
        tensors = [given.leaves[n] for n in given.tensors]
        # With the parameters, so that torch.autograd.grad reaches them, and is refused.
        trained = [p for p in self._module.parameters() if p.requires_grad]
        return run.result(_PartsFunction.apply(run, self._where, *tensors, *trained))  # type: ignore[no-untyped-call]

    def _why_whole(self) -> str:
        parameters = list(self._module.parameters())
        if not all(one.is_leaf for one in parameters):
            return "its parameters are computed outside of it, once for all parts"
        if self._known and any(map(has_gradient_hooks, parameters)):
            return "its parameters have gradient hooks, which would see the gradients of each part"
        return ""

    def _is_graded(self, given: CallArguments) -> bool:
        return any(p.requires_grad for p in self._module.parameters()) or any(
            given.leaves[n].requires_grad for n in given.tensors
        )

    def _kind(self, given: CallArguments) -> _Kind:
        """Return what decides how a call runs in parts, apart from the operators that it runs."""
        training = tuple(inner.training for inner in self._module.modules())
        trained = tuple(p.requires_grad for p in self._module.parameters())
        device = next((given.leaves[n].device.type for n in given.tensors), "cpu")
        return hash((training, trained)), given.signature, torch.is_autocast_enabled(device)

    def _studied_late(self, forward: Forward, given: CallArguments) -> StudyResult:
        """Study a call unlike the planned ones; if it may not run in parts, it runs as a whole."""
        try:
            return self._studied(forward, given)
        except ApplyFailed as error:
            why = str(error).partition("of the batch: ")[2].partition(". ")[0]
            raise _NotInParts(why.rstrip(".")) from error

    def _studied(self, forward: Forward, given: CallArguments) -> StudyResult:
        def study(call: CallArguments) -> StudyResult:
            where, module, parts = self._where, self._module, self._parts
            return Study(where, module, forward, call, parts, self._state).facts()

        try:
            return study(given)
        except ApplyFailed:
            given = given.transposed
            if given.size >= 2:
                # The model's own code may raise anything on a batch in a dimension that is none.
                with contextlib.suppress(Exception):
                    return study(given)
            raise


class _NotInParts(Exception):
    """A call that has to run as a whole, since parts would compute something else."""


class _OtherOperators(_NotInParts):
    """The first part ran other operators than when the module was studied, so it may mix samples now."""

    def __init__(self, operators: Counter[str]) -> None:
        super().__init__("its operators change from call to call")
        self.operators = operators


class _Studies:
    """What running one kind of call in parts requires, by the operators of its first part."""

    def __init__(self, facts: StudyResult) -> None:
        self.facts = facts
        self._known: list[tuple[Counter[str], StudyResult]] = []
        self._operators: Counter[str] | None = None

    def check(self, operators: Counter[str]) -> None:
        """Note the operators of the first part, or raise `_OtherOperators`."""
        if self._operators is None:
            self._operators = operators
            self._known.append((operators, self.facts))
        elif operators != self._operators:
            raise _OtherOperators(operators)

    def choose(self, operators: Counter[str], study: Callable[[], StudyResult]) -> None:
        """Use the facts that were found for these operators, or study them now."""
        known = [one for one in self._known if one[0] == operators]
        self._operators, self.facts = known[0] if known else (None, study())


class _PartedRun:
    """One call: its parts, their random numbers, and how their results are joined."""

    def __init__(
        self,
        state: BlockState,
        forward: Forward,
        given: CallArguments,
        studies: _Studies,
        parts: int,
    ) -> None:
        self._forward = forward
        self._studies = studies
        self.facts = studies.facts
        self._parts = tuple(parts_of(given.size, parts))
        tensors = [given.leaves[n] for n in given.tensors]
        self._ambient = Ambient(tensors)
        self._graded = [t.requires_grad for t in tensors]
        self.inputs = len(tensors)
        self._given = given.without_tensors
        self._state = state
        self._before = state.begin(generators=GivenArguments(given.tree).generators)
        self._totals: list[torch.Tensor] | None = None
        self._result: Any = None

    def result(self, tensors: Tensors) -> Any:
        rest, tree = iter(tensors), self._result
        self._result = None
        leaves = leaves_of(tree)
        return filled(tree, [next(rest) if leaf is _TENSOR else leaf for leaf in leaves])

    def forward(self, tensors: Tensors) -> list[torch.Tensor]:
        joined = self._pass(tensors)
        if any(self.facts.losses) and self._totals is not None:
            totals = [t for t, split in zip(self._totals, self.facts.losses, strict=True) if split]
            if self.facts.scales and all(bool(total == totals[0]) for total in totals[1:]):
                for n, dim in enumerate(self.facts.outputs):
                    if dim == SUM:
                        joined[n] = joined[n] / totals[0].to(joined[n].dtype)
            else:
                joined = self._pass(tensors)
        return joined

    def _pass(self, tensors: Tensors) -> list[torch.Tensor]:
        """Run all parts. If one runs unlike the module that was studied, restore state and raise."""
        try:
            return self._joined(tensors)
        except (ApplyFailed, _NotInParts) as error:
            self._before.restore()
            self._ambient.rewind()
            if isinstance(error, _NotInParts):
                raise
            raise _NotInParts(str(error)) from error

    def _joined(self, tensors: Tensors) -> list[torch.Tensor]:
        joined: list[torch.Tensor] = []
        counts: list[list[torch.Tensor]] = []
        first_time = self._result is None
        for rows in self._parts:
            plain = first_time and rows.first == 0
            with (
                self._part(again=not plain) as losses,
                self._ambient.again(graded=False),
                self._drawing(rows),
                Counting() if plain else contextlib.nullcontext() as counted,
            ):
                call = args, kwargs = self._given.arguments(self._given.part(rows, tensors))
                before = held(call) if first_time else []
                tree = self._forward(*args, **kwargs)
                if first_time and not is_same(before, held(call)):
                    raise _NotInParts("it writes to its arguments, of which each part gets a copy")
            counts.append(losses.counts)
            made = [leaf for leaf in leaves_of(tree) if isinstance(leaf, torch.Tensor)]
            self._join(joined, made, rows)
            if counted is not None:
                self._check_left()
                self._studies.check(counted.counts)
                # Leaves in a variable would keep this part's result alive during all other parts.
                self._result = filled(tree, list(map(_without_tensor, leaves_of(tree))))
        if self._totals is None:
            self._totals = [sum(one[1:], one[0]) for one in zip(*counts, strict=True)]
        return joined

    def _check_left(self) -> None:
        """Raise `_NotInParts` if parts would repeat the first one's effects."""
        written, drawn = self._before.has_run()
        why = f"it writes to `{written[0]}`, which each part would repeat" if written else ""
        # Every part may draw from `random`, as layer drop does.
        if not why and any(not isinstance(one, random.Random) for one in drawn):
            why = "it draws from its own generator, once for all samples"
        if why:
            raise _NotInParts(why)

    def _join(self, joined: list[torch.Tensor], made: Tensors, rows: SampleRows) -> None:
        if len(made) != len(self.facts.outputs):
            raise _NotInParts("it returns another number of tensors now")
        for number, (dim, tensor) in enumerate(zip(self.facts.outputs, made, strict=True)):
            if rows.first == 0:
                along = SampleLayout(dim, self.facts.orders[number])
                joined.append(rows.room(tensor, along) if dim >= 0 else tensor.clone())
            if dim >= 0:
                rows.put(joined[number], dim, self.facts.times[number], tensor)
            elif dim == SUM and rows.first:
                joined[number] += tensor

    def backward(self, tensors: Tensors, grads: Sequence[Any]) -> list[torch.Tensor | None]:
        """Rerun each part with gradients, followed by its backward. Return the gradients of the inputs."""
        of_inputs: Gradients = [None for _ in tensors]
        if any(has_gradient_hooks(one.tensor) for one in self._state.parameters()):
            raise ApplyFailed(
                "a parameter came to have gradient hooks between its forward and its backward, which would "
                "see the gradients of each part of the batch. Register them before forward, or take "
                "micro_batch out of the plan."
            )
        with self._ambient.aside():
            for rows in self._parts:
                self._part_backward(rows, tensors, grads, of_inputs)
        return of_inputs

    def _part_backward(
        self, rows: SampleRows, tensors: Tensors, grads: Sequence[Any], of_inputs: Gradients
    ) -> None:
        given = [t.detach() for t in tensors]
        leaves = self._given.part(rows, given)
        for number, graded in zip(self._given.tensors, self._graded, strict=True):
            if graded:
                leaves[number] = leaves[number].detach().requires_grad_()
        self._given.pair(leaves)
        mine = [None if n in self._given.twins else leaves[n] for n in self._given.tensors]
        with self._part(again=True):
            with self._ambient.again(graded=True), self._drawing(rows):
                args, kwargs = self._given.arguments(leaves)
                tree = self._forward(*args, **kwargs)
            made = [leaf for leaf in leaves_of(tree) if isinstance(leaf, torch.Tensor)]
            del tree
            pairs = list(self._pairs(made, grads, rows))
            del made
        # Outside: parameters that the program has frozen since get no gradient.
        if pairs:
            _run_backward(pairs)
        for number, tensor in enumerate(mine):
            if tensor is not None and tensor.grad is not None:
                self._collect(of_inputs, number, tensor.grad, rows)

    def _pairs(
        self, made: Tensors, grads: Sequence[Any], rows: SampleRows
    ) -> Iterator[tuple[GradientEdge, torch.Tensor]]:
        facts = self.facts
        for dim, times, tensor, grad in zip(facts.outputs, facts.times, made, grads, strict=True):
            if grad is None or not tensor.requires_grad or (dim == SAME and rows.first):
                continue
            yield get_gradient_edge(tensor), rows.take(grad, dim, times) if dim >= 0 else grad

    def _collect(self, sums: Gradients, number: int, grad: torch.Tensor, rows: SampleRows) -> None:
        there = sums[number]
        dim = self._given.batched.get(self._given.tensors[number])
        if dim is None:
            sums[number] = grad if there is None else there + grad
            return
        if there is None:
            there = sums[number] = rows.room(grad, SampleLayout(dim, order_of(grad))).zero_()
        rows.mine(there, dim).copy_(grad)

    @contextlib.contextmanager
    def _part(self, *, again: bool) -> Iterator[Losses]:
        losses = Losses(self.facts.losses, self._totals)
        nothing = contextlib.nullcontext()
        with self._before.again() if again else nothing:
            if again and self.facts.draws:
                self._ambient.rewind()
            with losses if self.facts.losses else nothing:
                yield losses

    def _drawing(self, rows: SampleRows) -> contextlib.AbstractContextManager[Any]:
        draws = self.facts.draws
        return Draws(draws, rows) if draws else contextlib.nullcontext()


_TENSOR = object()
"""Placeholder for a tensor of the result."""


def _without_tensor(leaf: Any) -> Any:
    return _TENSOR if isinstance(leaf, torch.Tensor) else leaf


def _run_backward(pairs: Sequence[tuple[GradientEdge, torch.Tensor]]) -> None:
    """Run `torch.autograd.backward` hidden from the recorder, which would count it as the script's."""
    edges, grads = zip(*pairs, strict=True)
    _engine_run_backward(
        edges, grads, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class _PartsFunction(torch.autograd.Function):
    """The call as one autograd function. Parameters receive their gradients during its backward."""

    @staticmethod
    def forward(
        ctx: Any, run: _PartedRun, where: str, *given: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        tensors = given[: run.inputs]
        ctx.run, ctx.where, ctx.parameters = run, where, len(given) - run.inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        made = run.forward(tensors)
        ctx.mark_non_differentiable(
            *(t for t, g in zip(made, run.facts.graded, strict=True) if not g)
        )
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        try:
            is_plain: Any = torch.autograd._is_checkpoint_valid
            if torch.is_grad_enabled() or not is_plain():
                raise ApplyFailed(
                    f"`{ctx.where}` runs in parts of the batch, so it supports `backward()` without "
                    "`inputs` and `create_graph`, but not torch.autograd.grad. Take micro_batch out of "
                    "the plan."
                )
            tensors, run = ctx.saved_tensors, ctx.run
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                ctx.run = None  # the loop may keep its loss, and so this node
            of_inputs = run.backward(tensors, grads)
            return None, None, *of_inputs, *itertools.repeat(None, ctx.parameters)
        except Exception as error:
            note(error, ctx.where)
            raise


def in_parts(roots: Mapping[str, nn.Module], where: str, parts: int) -> Handle:
    """Make a module or a range of a Sequential run in parts. Raises `ApplyFailed` if it does not exist."""
    part = part_at(roots, where)
    if part.span is None:
        run = InParts(where, part.module, parts)
        return Swapped(part.module, functools.partial(functools.partial, run))
    first, last = part.span
    inner = nn.Sequential(*list(part.chain)[first:last])
    return Ranges(part.chain, [Range(first, last, InParts(where, inner, parts), where)])
