"""Runs a recurrent layer in pieces of time, and recomputes their gates in backward.

Cells get their gates as two products, `of_given` and `of_state`, of shape (batch, gates * width), with biases
included, in the order of `torch.nn.LSTM` (input, forget, cell, output) and `torch.nn.GRU` (reset, update,
new).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils import _pytree as pytree

from torchtrim.errors import ApplyFailed
from torchtrim.executor.autograd import only_once
from torchtrim.executor.ordinals import Counting, passed, unnumbered
from torchtrim.executor.swap import Swapped, is_of_another, is_swapped
from torchtrim.techniques.split_time.layers import PIECE


class CellState(NamedTuple):
    """The state passed from step to step, (batch, width) each; `cell` is None in a GRU."""

    hidden: Tensor
    cell: Tensor | None


class CellGradients(NamedTuple):
    """Gradients of the two products, and of the previous state without its part through `of_state`."""

    of_given: Tensor
    of_state: Tensor
    before: CellState


class LstmCell:
    """Hochreiter and Schmidhuber, Long short-term memory, 1997, with forget gates."""

    gates = 4

    @staticmethod
    def forward(of_given: Tensor, of_state: Tensor, before: CellState) -> CellState:
        """Return the state after a step."""
        assert before.cell is not None
        enters, stays, new, leaves = (of_given + of_state).chunk(4, 1)
        cell = stays.sigmoid() * before.cell + enters.sigmoid() * new.tanh()
        return CellState(leaves.sigmoid() * cell.tanh(), cell)

    @staticmethod
    def backward(
        of_given: Tensor,
        of_state: Tensor,
        before: CellState,
        after: Tensor | None,
        slope: CellState,
    ) -> CellGradients:
        """Return the gradients of a step. `after`: the cell state after it."""
        assert before.cell is not None
        assert after is not None
        assert slope.cell is not None
        sums = of_given + of_state
        enters, stays, new, leaves = sums.chunk(4, 1)
        for gate in (enters, stays, leaves):
            gate.sigmoid_()
        new.tanh_()
        shown = after.tanh()
        cell = slope.cell + slope.hidden * leaves * (1 - shown * shown)
        before_cell = cell * stays
        leaves.copy_(slope.hidden * shown * leaves * (1 - leaves))
        stays.copy_(cell * before.cell * stays * (1 - stays))
        of_enters = cell * new * enters * (1 - enters)
        new.copy_(cell * enters * (1 - new * new))
        enters.copy_(of_enters)
        return CellGradients(sums, sums, CellState(slope.hidden.new_zeros(()), before_cell))


class GruCell:
    """Cho et al., Learning phrase representations using RNN encoder-decoder, 2014, as cuDNN computes it."""

    gates = 3

    @staticmethod
    def forward(of_given: Tensor, of_state: Tensor, before: CellState) -> CellState:
        """Return the state after a step."""
        _, update, new, _ = GruCell._gates(of_given, of_state)
        return CellState(new + update * (before.hidden - new), None)

    @staticmethod
    def backward(
        of_given: Tensor, of_state: Tensor, before: CellState, _: Tensor | None, slope: CellState
    ) -> CellGradients:
        """Return the gradients of a step."""
        reset, update, new, of_new = GruCell._gates(of_given, of_state)
        of_update = slope.hidden * (before.hidden - new) * update * (1 - update)
        slope_new = slope.hidden * (1 - update) * (1 - new * new)
        of_reset = slope_new * of_new * reset * (1 - reset)
        given = torch.cat((of_reset, of_update, slope_new), 1)
        state = torch.cat((of_reset, of_update, slope_new * reset), 1)
        return CellGradients(given, state, CellState(slope.hidden * update, None))

    @staticmethod
    def _gates(of_given: Tensor, of_state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return reset, update and new gates, and the state's part of the new gate before its reset."""
        width = of_given.shape[1] // 3
        both = (of_given[:, : 2 * width] + of_state[:, : 2 * width]).sigmoid_()
        reset, update = both.chunk(2, 1)
        of_new = of_state[:, 2 * width :]
        return reset, update, (of_given[:, 2 * width :] + reset * of_new).tanh_(), of_new


Cell = type[LstmCell] | type[GruCell]
Forward = Callable[..., Any]
_FORWARDS = (nn.LSTM.forward, nn.GRU.forward)
_SEQUENCE = 3  # dimensions of a batch of sequences


def split(where: str, module: nn.Module) -> Swapped:
    """Give an LSTM or GRU a forward in pieces of time. Raises `ApplyFailed` for another module."""
    if not isinstance(module, nn.LSTM | nn.GRU):
        raise _refused(where, f"is a {type(module).__name__}, not an LSTM or a GRU")
    if is_swapped(module):
        raise _refused(where, "is changed by another technique of the plan")
    if "forward" in module.__dict__ or type(module).forward not in _FORWARDS:
        raise _refused(where, "has its own forward")
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
    """Return the operators of the module's own forward by name; two samples run as many as all do."""
    few = given[:2] if module.batch_first else given[:, :2]
    states = None if hx is None else pytree.tree_map(lambda one: one[:, :2], hx)
    with Counting() as counting:
        forward(few.detach(), states)
    return counting.counts


def _is_ours(module: nn.LSTM | nn.GRU, given: Any) -> bool:
    if not torch.is_grad_enabled() or not isinstance(given, Tensor):
        return False
    if given.dim() != _SEQUENCE or not given.numel():
        return False
    drops = module.training and module.dropout > 0 and module.num_layers > 1
    return not drops and not torch.is_autocast_enabled(given.device.type)


def _layers(module: nn.LSTM | nn.GRU, given: Tensor, hx: Any) -> tuple[Tensor, Any]:
    """Run all layers and directions, with the shapes of the module's own forward."""
    cell: Cell = LstmCell if isinstance(module, nn.LSTM) else GruCell
    directions = 2 if module.bidirectional else 1
    x = given.transpose(0, 1) if module.batch_first else given
    firsts = _firsts(module, x, hx, directions)
    ends: list[CellState] = []
    for layer in range(module.num_layers):
        outs = []
        for direction in range(directions):
            first = firsts[layer * directions + direction]
            weights = _weights(module, layer, direction)
            out, *last = _Time.apply(cell, bool(direction), x, *first, *weights)  # type: ignore[no-untyped-call]
            outs.append(out)
            ends.append(CellState(last[0], last[1] if cell is LstmCell else None))
        x = torch.cat(outs, 2) if directions > 1 else outs[0]
    hidden = torch.stack([one.hidden for one in ends])
    whole = x.transpose(0, 1) if module.batch_first else x
    if cell is GruCell:
        return whole, hidden
    return whole, (hidden, torch.stack([one.cell for one in ends if one.cell is not None]))


def _firsts(module: nn.LSTM | nn.GRU, x: Tensor, hx: Any, directions: int) -> list[CellState]:
    """Return the first state of each layer and direction, checked as in the module's own forward."""
    count = module.num_layers * directions
    has_cells = isinstance(module, nn.LSTM)
    if hx is None:
        zeros = x.new_zeros(x.shape[1], module.hidden_size)
        return [CellState(zeros, zeros if has_cells else None)] * count
    module.check_forward_args(x.transpose(0, 1) if module.batch_first else x, hx, None)
    if not has_cells:
        return [CellState(one, None) for one in hx.unbind(0)]
    return [CellState(*one) for one in zip(hx[0].unbind(0), hx[1].unbind(0), strict=True)]


def _weights(module: nn.RNNBase, layer: int, direction: int) -> list[Tensor | None]:
    """Return weights and biases of a layer in one direction, for the input and for the state."""
    suffix = f"_l{layer}{'_reverse' if direction else ''}"
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    return [getattr(module, f"{name}{suffix}", None) for name in names]


class _Time(torch.autograd.Function):
    """One layer in one direction: x (time, batch, width of x) to states (time, batch, width) and the last."""

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
        cells = torch.empty_like(out) if cell is LstmCell else None
        state = CellState(hidden, first_cell)
        for piece in _pieces(steps, backwards):
            given = linear(_part(x, piece), of_x, bias_x).view(len(piece), batch, -1)
            for at, time in enumerate(piece):
                state = cell.forward(given[at], linear(state.hidden, of_h, bias_h), state)
                out[time] = state.hidden
                if cells is not None and state.cell is not None:
                    cells[time] = state.cell
        ctx.save_for_backward(x, hidden, first_cell, out, cells, *weights)
        ctx.set_materialize_grads(False)
        last = 0 if backwards else -1
        return out, *(one[last].clone() for one in (out, cells) if one is not None)

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
        self._of_x = torch.empty_like(self._x) if self._wanted[0] else None
        self._sums = [
            torch.zeros_like(one) if one is not None and wanted else None
            for one, wanted in zip(self._weights, self._wanted[3:], strict=True)
        ]
        self._slope = CellState(
            self._zeros(comes[1]), self._zeros(comes[2]) if self._cell is LstmCell else None
        )

    def run(self) -> tuple[Any, ...]:
        """Return the gradients in the order of the arguments of `_Time.forward`."""
        for piece in reversed(list(_pieces(self._x.shape[0], self._backwards))):
            self._through(piece)
        of_hidden = self._slope.hidden if self._wanted[1] else None
        of_cell = self._slope.cell if self._wanted[2] else None
        return None, None, self._of_x, of_hidden, of_cell, *self._sums

    def _zeros(self, comes: Tensor | None) -> Tensor:
        return torch.zeros_like(self._hidden) if comes is None else comes

    def _through(self, piece: list[int]) -> None:
        """Recompute the gates of a piece, its gradients from the last step to the first, and add these up."""
        of_x, of_h, bias_x, bias_h = self._weights
        batch = self._x.shape[1]
        part, before = _part(self._x, piece), self._before(self._out, self._hidden, piece)
        given = linear(part, of_x, bias_x).view(len(piece), batch, -1)
        state = linear(before, of_h, bias_h).view(len(piece), batch, -1)
        starts = None
        if self._cells is not None:
            starts = self._before(self._cells, self._first, piece).view(len(piece), batch, -1)
        for at in reversed(range(len(piece))):
            then = CellState(
                before[at * batch : (at + 1) * batch], starts[at] if starts is not None else None
            )
            after = None if self._cells is None else self._cells[piece[at]]
            slope = self._slope
            if self._of_out is not None:
                slope = slope._replace(hidden=slope.hidden + self._of_out[piece[at]])
            slopes = self._cell.backward(given[at], state[at], then, after, slope)
            del slope  # Its memory is reused.
            given[at], state[at] = slopes.of_given, slopes.of_state
            self._slope = CellState(
                torch.addmm(slopes.before.hidden, state[at], of_h), slopes.before.cell
            )
        self._add(part, before, given.view(-1, given.shape[2]), state.view(-1, state.shape[2]))
        if self._of_x is not None:
            made = (given.view(-1, given.shape[2]) @ of_x).view(len(piece), batch, -1)
            for at, time in enumerate(piece):
                self._of_x[time] = made[at]

    def _add(self, part: Tensor, before: Tensor, given: Tensor, state: Tensor) -> None:
        """Add a piece's gradients of the weights and biases."""
        weights, biases = self._sums[:2], self._sums[2:]
        pairs = ((given, part), (state, before))
        for of_weight, of_bias, (slope, entered) in zip(weights, biases, pairs, strict=True):
            if of_weight is not None:
                of_weight.addmm_(slope.t(), entered)
            if of_bias is not None:
                of_bias.add_(slope.sum(0))

    def _before(self, states: Tensor, first: Tensor, piece: list[int]) -> Tensor:
        """Return the states before the steps of a piece, concatenated along the batch."""
        back = 1 if self._backwards else -1
        times = (time + back for time in piece)
        return torch.cat([states[at] if 0 <= at < len(states) else first for at in times])


def _pieces(steps: int, backwards: bool) -> Iterator[list[int]]:
    """Yield the times of each piece, in the layer's order."""
    times = list(range(steps))[:: -1 if backwards else 1]
    for first in range(0, steps, PIECE):
        yield times[first : first + PIECE]


def _part(x: Tensor, piece: list[int]) -> Tensor:
    """Return the inputs at some times, concatenated along the batch."""
    return torch.cat([x[time] for time in piece])
