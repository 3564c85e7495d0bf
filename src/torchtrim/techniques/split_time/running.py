"""Runs a recurrent layer in pieces of time, and their gates again in backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchtrim.errors import ApplyFailed
from torchtrim.executor.once import only_once
from torchtrim.executor.ordinals import Counting, passed, unnumbered
from torchtrim.executor.swap import Swapped, is_of_another, is_swapped
from torchtrim.techniques.split_time.cells import Cell, Gru, Lstm, State
from torchtrim.techniques.split_time.found import PIECE

Forward = Callable[..., Any]
_FORWARDS = (nn.LSTM.forward, nn.GRU.forward)
_SEQUENCE = 3


def split(where: str, module: nn.Module) -> Swapped:
    """Give an LSTM or GRU a forward in pieces of time. Raises `ApplyFailed` for another module."""
    if not isinstance(module, nn.LSTM | nn.GRU):
        raise _refused(where, f"is a {type(module).__name__}, no LSTM and no GRU")
    if is_swapped(module):
        raise _refused(where, "is changed by another technique of the plan")
    if "forward" in module.__dict__ or type(module).forward not in _FORWARDS:
        raise _refused(where, "has a forward of its own")
    if module.proj_size:
        raise _refused(where, "has projections")
    if module.training and module.dropout > 0 and module.num_layers > 1:
        raise _refused(where, "draws random numbers between its layers")
    return Swapped(module, lambda forward: _in_time(module, forward))


def _refused(where: str, why: str) -> ApplyFailed:
    return ApplyFailed(f"`{where}` {why}, so split_time cannot run it. Plan again.")


def _in_time(module: nn.LSTM | nn.GRU, forward: Forward) -> Forward:
    if is_of_another(forward, module):
        return forward

    operators: dict[int, Counter[str]] = {}

    def call(input: Any, hx: Any = None) -> Any:
        if not _is_ours(module, input):
            return forward(input, hx)
        with unnumbered():
            steps = input.shape[1 if module.batch_first else 0]
            if steps not in operators:
                operators[steps] = _operators(module, forward, input, hx)
            made = _layers(module, input, hx)
        passed(operators[steps])
        return made

    return call


def _operators(module: nn.LSTM | nn.GRU, forward: Forward, given: Tensor, hx: Any) -> Counter[str]:
    """How many the module's own forward runs, by name: for two samples as many as for all."""
    few = given[:2] if module.batch_first else given[:, :2]
    states = None if hx is None else pytree.tree_map(lambda one: one[:, :2], hx)
    with Counting() as counting:
        forward(few.detach(), states)
    return counting.counts


def _is_ours(module: nn.LSTM | nn.GRU, given: Any) -> bool:
    plain = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if not plain or not isinstance(given, Tensor) or given.dim() != _SEQUENCE or not given.numel():
        return False
    drops = module.training and module.dropout > 0 and module.num_layers > 1
    return not drops and not torch.is_autocast_enabled(given.device.type)


def _layers(module: nn.LSTM | nn.GRU, given: Tensor, hx: Any) -> tuple[Tensor, Any]:
    """All layers and directions. Shapes are those of the module's own forward."""
    cell: Cell = Lstm() if isinstance(module, nn.LSTM) else Gru()
    directions = 2 if module.bidirectional else 1
    x = given.transpose(0, 1) if module.batch_first else given
    firsts = _firsts(module, x, hx, directions)
    ends: list[State] = []
    for layer in range(module.num_layers):
        outs = []
        for direction in range(directions):
            first = firsts[layer * directions + direction]
            weights = _weights(module, layer, direction)
            out, *last = _Time.apply(cell, bool(direction), x, *first, *weights)  # type: ignore[no-untyped-call]
            outs.append(out)
            ends.append(State(last[0], last[1] if cell.cells else None))
        x = torch.cat(outs, 2) if directions > 1 else outs[0]
    hidden = torch.stack([one.hidden for one in ends])
    whole = x.transpose(0, 1) if module.batch_first else x
    if not cell.cells:
        return whole, hidden
    return whole, (hidden, torch.stack([one.cell for one in ends if one.cell is not None]))


def _firsts(module: nn.LSTM | nn.GRU, x: Tensor, hx: Any, directions: int) -> list[State]:
    """The first state of each layer and direction, checked as the module's own forward does."""
    count = module.num_layers * directions
    has_cells = isinstance(module, nn.LSTM)
    if hx is None:
        zeros = x.new_zeros(x.shape[1], module.hidden_size)
        return [State(zeros, zeros if has_cells else None)] * count
    module.check_forward_args(x.transpose(0, 1) if module.batch_first else x, hx, None)
    if not has_cells:
        return [State(one, None) for one in hx.unbind(0)]
    return [State(*one) for one in zip(hx[0].unbind(0), hx[1].unbind(0), strict=True)]


def _weights(module: nn.RNNBase, layer: int, direction: int) -> list[Tensor | None]:
    """Weights and biases of a layer in one direction, of what is given and of the state."""
    suffix = f"_l{layer}{'_reverse' if direction else ''}"
    names = ["weight_ih", "weight_hh", "bias_ih", "bias_hh"]
    return [getattr(module, f"{name}{suffix}", None) for name in names]


class _Time(torch.autograd.Function):
    """One layer in one direction: x (time, batch, given) to states (time, batch, width) and the last."""

    @staticmethod
    def forward(
        ctx: Any,
        cell: Cell,
        backwards: bool,
        x: Tensor,
        hidden: Tensor,
        first_cell: Tensor | None,
        *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.cell, ctx.backwards = cell, backwards
        of_x, of_h, bias_x, bias_h = weights
        assert of_x is not None
        assert of_h is not None
        steps, batch = x.shape[:2]
        out = x.new_empty(steps, batch, hidden.shape[1])
        cells = torch.empty_like(out) if cell.cells else None
        state = State(hidden, first_cell)
        for piece in _pieces(steps, backwards):
            given = _product(_part(x, piece), of_x, bias_x).view(len(piece), batch, -1)
            for at, time in enumerate(piece):
                state = cell.forward(given[at], _product(state.hidden, of_h, bias_h), state)
                out[time] = state.hidden
                if cells is not None and state.cell is not None:
                    cells[time] = state.cell
        ctx.save_for_backward(x, hidden, first_cell, out, cells, *weights)
        ctx.set_materialize_grads(False)
        last = (out[_last(steps, backwards)].clone(),)
        return (
            (out, *last) if cells is None else (out, *last, cells[_last(steps, backwards)].clone())
        )

    @staticmethod
    def backward(ctx: Any, *comes: Tensor | None) -> tuple[Any, ...]:
        only_once("split_time")
        return _Backward(ctx, comes).run()


class _Backward:
    """The gradients of one layer in one direction, summed over pieces of time."""

    def __init__(self, ctx: Any, comes: tuple[Tensor | None, ...]) -> None:
        self._cell: Cell = ctx.cell
        self._backwards: bool = ctx.backwards
        self._wanted: tuple[bool, ...] = ctx.needs_input_grad[2:]
        self._x, self._hidden, self._first, self._out, self._cells, *self._weights = (
            ctx.saved_tensors
        )
        self._of_out = comes[0]
        made = [None, *self._weights]
        self._of_x = torch.empty_like(self._x) if self._wanted[0] else None
        self._sums = [
            torch.zeros_like(one) if one is not None and wanted else None
            for one, wanted in zip(made[1:], self._wanted[3:], strict=True)
        ]
        self._slope = State(
            self._zeros(comes[1]), self._zeros(comes[2]) if self._cell.cells else None
        )

    def run(self) -> tuple[Any, ...]:
        """In the order of what `_Time.forward` takes."""
        for piece in reversed(list(_pieces(self._x.shape[0], self._backwards))):
            self._through(piece)
        of_hidden = self._slope.hidden if self._wanted[1] else None
        of_cell = self._slope.cell if self._wanted[2] else None
        return None, None, self._of_x, of_hidden, of_cell, *self._sums

    def _zeros(self, comes: Tensor | None) -> Tensor:
        return torch.zeros_like(self._hidden) if comes is None else comes

    def _through(self, piece: list[int]) -> None:
        """Gates of a piece again, its slopes from the last step to the first, and what these add."""
        of_x, of_h, bias_x, bias_h = self._weights
        batch = self._x.shape[1]
        part, before = _part(self._x, piece), self._before(self._out, self._hidden, piece)
        given = _product(part, of_x, bias_x).view(len(piece), batch, -1)
        state = _product(before, of_h, bias_h).view(len(piece), batch, -1)
        starts = None
        if self._cells is not None:
            starts = self._before(self._cells, self._first, piece).view(len(piece), batch, -1)
        for at in reversed(range(len(piece))):
            then = State(
                before[at * batch : (at + 1) * batch], starts[at] if starts is not None else None
            )
            slopes = self._slopes(given[at], state[at], then, piece[at])
            given[at], state[at] = slopes.of_given, slopes.of_state
            self._slope = State(
                torch.addmm(slopes.before.hidden, state[at], of_h), slopes.before.cell
            )
        self._add(part, before, given.view(-1, given.shape[2]), state.view(-1, state.shape[2]))
        if self._of_x is not None:
            made = (given.view(-1, given.shape[2]) @ of_x).view(len(piece), batch, -1)
            for at, time in enumerate(piece):
                self._of_x[time] = made[at]

    def _slopes(self, given: Tensor, state: Tensor, then: State, time: int) -> Any:
        hidden = self._slope.hidden
        if self._of_out is not None:
            hidden = hidden + self._of_out[time]
        after = State(self._out[time], self._cells[time] if self._cells is not None else None)
        return self._cell.backward(given, state, then, after, State(hidden, self._slope.cell))

    def _add(self, part: Tensor, before: Tensor, given: Tensor, state: Tensor) -> None:
        """Add a piece's gradients of the weights and biases."""
        of_x, of_h, bias_x, bias_h = self._sums
        if of_x is not None:
            of_x.addmm_(given.t(), part)
        if of_h is not None:
            of_h.addmm_(state.t(), before)
        if bias_x is not None:
            bias_x.add_(given.sum(0))
        if bias_h is not None:
            bias_h.add_(state.sum(0))

    def _before(self, states: Tensor, first: Tensor, piece: list[int]) -> Tensor:
        """The states before the steps of a piece, one below the other."""
        back = 1 if self._backwards else -1
        times = [time + back for time in piece]
        known = [states[time] if 0 <= time < len(states) else first for time in times]
        return torch.cat(known)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def _pieces(steps: int, backwards: bool) -> Iterator[list[int]]:
    """The times of each piece, in the order in which the layer goes through them."""
    times = list(range(steps))[:: -1 if backwards else 1]
    for first in range(0, steps, PIECE):
        yield times[first : first + PIECE]


def _part(x: Tensor, piece: list[int]) -> Tensor:
    """What is given at some times, one below the other."""
    return torch.cat([x[time] for time in piece])


def _last(steps: int, backwards: bool) -> int:
    return 0 if backwards else steps - 1
