"""Runs a module in parts of its rows, and again in backward."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from torchtrim.errors import ApplyFailed
from torchtrim.executor.arguments import held, is_same
from torchtrim.executor.autograd import casting, only_once
from torchtrim.executor.block_state import Before, BlockState
from torchtrim.executor.failing import note
from torchtrim.executor.ordinals import Counting, unnumbered
from torchtrim.executor.swap import Swapped, is_of_another
from torchtrim.techniques.micro_batch.inputs import Ambient
from torchtrim.techniques.micro_batch.rows import Leaves, filled, leaves_of

Forward = Callable[..., Any]
_FIXED = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""Arguments beside the tensor. Other objects, such as iterators, may change with the call of each part."""


def split(where: str, module: nn.Module, parts: int) -> Swapped:
    """Give a module a forward in parts. Raises `ApplyFailed` for a module whose rows may interact."""
    rows = _InRows(where, module, parts)
    if why := rows.why_whole():
        raise ApplyFailed(f"`{where}` cannot run in parts of its rows: {why}. Plan again.")
    return Swapped(module, rows.wrapped)


class _NotInRows(Exception):
    """A call that has to run as a whole, since parts would compute something else."""


class _InRows:
    """Runs a module's forward in parts of the rows if gradients are needed."""

    def __init__(self, where: str, module: nn.Module, parts: int) -> None:
        self._where = where
        self._module = module
        self.parts = parts
        self.state = BlockState([module], where)
        self._operators: dict[tuple[Any, ...], Counter[str]] = {}
        self._why = ""

    def wrapped(self, forward: Forward) -> Forward:
        """Return a forward in parts, or the given one for a copy with other parameters."""
        if is_of_another(forward, self._module):
            return forward
        return functools.partial(self._run, forward)

    def why_whole(self) -> str:
        """Return why the rows may interact now, or an empty string."""
        if why := self._why or self.state.why_once():
            return why
        for inner in self.state.modules:
            if isinstance(inner, (_NormBase, nn.MultiheadAttention)):
                return f"it has a {type(inner).__name__}, whose rows interact"
            if isinstance(inner, _DropoutNd) and inner.training and inner.p > 0:
                return "it draws random numbers, which would differ in parts"
        return ""

    def first(self, forward: _OfPart, part: Tensor, before: Before) -> Any:
        """Run the first part. Raise `_NotInRows` if it ran unlike the first call's, or changed state."""
        ambient = Ambient([part])
        with Counting() as counting:
            made = forward(part)
        kind = part.dim(), part.dtype, torch.is_autocast_enabled(part.device.type), *self.state.mode
        written, drawn = before.has_run()
        why = ""
        if written:
            why = f"it writes to `{written[0]}`, which each part would repeat"
        elif drawn:
            why = "it draws from its own generator, once for all rows"
        elif forward.writes:
            why = "it writes to its arguments, of which each part gets a copy"
        elif self._operators.setdefault(kind, counting.counts) != counting.counts:
            why = "it runs other operators than before, and its rows may interact"
        if why:
            before.restore()
            ambient.rewind()
            raise _NotInRows(why)
        return made

    def _run(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        leaves = leaves_of((args, kwargs))
        tensors = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if not tensors and not self._operators:
            raise self._without_tensor()
        fixed = all(isinstance(leaf, (Tensor, *_FIXED)) for leaf in leaves)
        given = leaves[tensors[0]] if len(tensors) == 1 and fixed else None
        if given is None or given.dim() < 2:
            return forward(*args, **kwargs)
        owned = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        if prod(given.shape[:-1]) < self.parts or not (given.requires_grad or owned):
            return forward(*args, **kwargs)
        why = self.why_whole()
        # `functional_call` leaves other tensors in a module of two names: torch's own fault, as of 2.13.
        if not all(one.is_leaf and isinstance(one, nn.Parameter) for one in owned):
            why = why or "its parameters are computed outside of it"
        if not why:
            run = _OfPart(forward, (args, kwargs), leaves, tensors[0])
            try:
                return _RowParts.apply(self, run, given, *owned)  # type: ignore[no-untyped-call]
            except _NotInRows as found:
                why = self._why = str(found)
            except ApplyFailed as error:
                note(error, self._where)
                raise
        self.state.says_once(why)
        return forward(*args, **kwargs)

    def _without_tensor(self) -> ApplyFailed:
        error = ApplyFailed(
            f"`{self._where}` cannot run in parts of its rows: its first call has no tensor among its "
            "arguments, nor in their tuples, lists, dicts and dataclasses. Pass a tensor, not what makes it."
        )
        note(error, self._where)
        return error


class _OfPart:
    """A call's forward as a function of its one tensor, which is not kept alive.

    `writes`: the call has written to its arguments, of which each part gets a copy.
    """

    def __init__(self, forward: Forward, call: Any, leaves: Leaves, place: int) -> None:
        self._forward = forward
        self._place = place
        self._call = filled(call, [*leaves[:place], None, *leaves[place + 1 :]])
        self.writes = False

    def __call__(self, part: Tensor) -> Any:
        """Run the forward on a part."""
        leaves = leaves_of(self._call)
        leaves[self._place] = part
        call = args, kwargs = filled(self._call, leaves)
        before = held(call)
        made = self._forward(*args, **kwargs)
        self.writes |= not is_same(before, held(call))
        return made


class _RowParts(torch.autograd.Function):
    """A module's forward, one part of the rows at a time; only its input is saved."""

    @staticmethod
    def forward(
        ctx: Any, rows_of: _InRows, forward: _OfPart, given: Tensor, *owned: Tensor
    ) -> Tensor:
        ctx.again, ctx.cast = forward, casting(given.device.type)
        ctx.before = before = rows_of.state.begin()
        count = prod(given.shape[:-1])
        size = -(-count // rows_of.parts)
        ctx.spans = [(at, min(at + size, count)) for at in range(0, count, size)]
        # What is written to the parameters in between, the state before the first run knows.
        ctx.owned = owned
        ctx.save_for_backward(given)
        with unnumbered() as as_before:
            rows, whole = _rows(given), None
            for first, last in ctx.spans:
                part = rows[..., first:last, :]
                if first == 0:
                    with as_before(True):
                        made = rows_of.first(forward, part, before)
                else:
                    with before.again():
                        made = forward(part)
                del part
                if whole is None:
                    whole = _empty_result(made, rows, last - first)
                whole[first:last] = made.view(last - first, -1)
                del made
            assert whole is not None
            return whole.view(*given.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        only_once("split_matmul")
        (given,), owned = ctx.saved_tensors, ctx.owned
        rows, comes = _rows(given.detach()), gradient.reshape(-1, gradient.shape[-1])
        wanted = ctx.needs_input_grad[2]
        of_given = torch.zeros_like(rows) if wanted else None
        sums: list[Tensor | None] = [None] * len(owned)
        for first, last in ctx.spans:
            part = rows[..., first:last, :].requires_grad_(wanted)
            with ctx.before.again(), torch.enable_grad(), ctx.cast():
                made = ctx.again(part)
                if first == 0:
                    _check_owned(made, [part, *owned])
                # By their edges: the program may have frozen parameters since.
                inputs = [*map(get_gradient_edge, [part, *owned] if wanted else owned)]
            edge, comes_here = get_gradient_edge(made), comes[first:last].view(made.shape)
            del made
            with _without_hooks(owned):
                found: list[Tensor | None] = [
                    *torch.autograd.grad(edge, inputs, comes_here, allow_unused=True)
                ]
            if of_given is not None and found[0] is not None:
                of_given[..., first:last, :].copy_(found[0])
            del found[: len(found) - len(owned)]
            _add(sums, found)
        whole = of_given.view(given.shape) if of_given is not None else None
        return None, None, whole, *sums


@contextlib.contextmanager
def _without_hooks(owned: Sequence[Tensor]) -> Iterator[None]:
    """Keep hooks on the gradients of parameters from seeing a part's gradients."""
    tables: list[Any] = [one._backward_hooks for one in owned if one._backward_hooks]
    hooks = [(table, dict(table)) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, known in hooks:
            table.update(known)


def _check_owned(made: Tensor, inputs: Sequence[Tensor]) -> None:
    """Raise `ApplyFailed` if a result depends on tensors with gradients apart from these."""
    # By node, since a saved tensor that went through hooks comes back as another object on the same node.
    known = {get_gradient_edge(one).node for one in inputs if one.requires_grad}
    nodes = [made.grad_fn]
    seen: set[Any] = set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", None) is not None and node not in known:
            raise ApplyFailed(
                "a module that split_matmul runs in parts uses a tensor from outside that needs a gradient, "
                "which would be lost. Make it a parameter or an input of the module, or remove split_matmul "
                "from the plan."
            )
        nodes += [one for one, _ in node.next_functions]


def _add(sums: list[Tensor | None], found: list[Tensor | None]) -> None:
    """Add a part's gradients of parameters, and free them."""
    for number in range(len(sums)):
        one, known = found[number], sums[number]
        found[number] = None
        sums[number] = one if known is None else known if one is None else known.add_(one)


def _rows(given: Tensor) -> Tensor:
    """Return a view with the same number of dimensions, and all rows in the last but one."""
    return given.reshape(*(1,) * (given.dim() - 2), -1, given.shape[-1])


def _empty_result(made: Any, rows: Tensor, count: int) -> Tensor:
    if not isinstance(made, Tensor) or made.shape[:-1] != (*rows.shape[:-2], count):
        raise ApplyFailed(
            f"a module that split_matmul runs in parts returned "
            f"{getattr(made, 'shape', type(made).__name__)} for {count} rows, so its rows are not "
            "independent. Remove it from the plan."
        )
    return made.new_empty(rows.shape[-2], made.shape[-1])
