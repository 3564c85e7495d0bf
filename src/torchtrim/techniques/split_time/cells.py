"""The cells of an LSTM and of a GRU: one time step, and its slopes.

Gates come as two products, `of_given` and `of_state`, (batch, gates times width) with their biases, in the
order of `torch.nn.LSTM` (input, forget, cell, output) and `torch.nn.GRU` (reset, update, new).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class State(NamedTuple):
    """What goes from step to step: (batch, width) each; `cell` is None in a GRU."""

    hidden: Tensor
    cell: Tensor | None


class Slopes(NamedTuple):
    """Of the two products, and of the state before, what comes through `of_state` apart."""

    of_given: Tensor
    of_state: Tensor
    before: State


class Cell(Protocol):
    """One kind of cell. `gates`: how many it has; `cells`: whether it has a state beside the hidden one."""

    gates: int
    cells: bool

    def forward(self, of_given: Tensor, of_state: Tensor, before: State) -> State:
        """The state after a step."""
        ...

    def backward(
        self, of_given: Tensor, of_state: Tensor, before: State, after: State, slope: State
    ) -> Slopes:
        """The slopes of a step; `after.hidden` is not looked at."""
        ...


class Lstm:
    """Hochreiter and Schmidhuber, Long short-term memory, 1997, with forget gates."""

    gates = 4
    cells = True

    def forward(self, of_given: Tensor, of_state: Tensor, before: State) -> State:
        """See `Cell`."""
        assert before.cell is not None
        enters, stays, new, leaves = (of_given + of_state).chunk(4, 1)
        cell = stays.sigmoid() * before.cell + enters.sigmoid() * new.tanh()
        return State(leaves.sigmoid() * cell.tanh(), cell)

    def backward(
        self, of_given: Tensor, of_state: Tensor, before: State, after: State, slope: State
    ) -> Slopes:
        """See `Cell`."""
        assert before.cell is not None
        assert after.cell is not None
        assert slope.cell is not None
        sums = of_given + of_state
        enters, stays, new, leaves = sums.chunk(4, 1)
        for gate in (enters, stays, leaves):
            gate.sigmoid_()
        new.tanh_()
        shown = after.cell.tanh()
        cell = slope.cell + slope.hidden * leaves * (1 - shown * shown)
        before_cell = cell * stays
        leaves.copy_(slope.hidden * shown * leaves * (1 - leaves))
        stays.copy_(cell * before.cell * stays * (1 - stays))
        of_enters = cell * new * enters * (1 - enters)
        new.copy_(cell * enters * (1 - new * new))
        enters.copy_(of_enters)
        return Slopes(sums, sums, State(slope.hidden.new_zeros(()), before_cell))


class Gru:
    """Cho et al., Learning phrase representations using RNN encoder-decoder, 2014, as cuDNN computes it."""

    gates = 3
    cells = False

    def forward(self, of_given: Tensor, of_state: Tensor, before: State) -> State:
        """See `Cell`."""
        _, update, new, _ = self._gates(of_given, of_state)
        return State(new + update * (before.hidden - new), None)

    def backward(
        self, of_given: Tensor, of_state: Tensor, before: State, after: State, slope: State
    ) -> Slopes:
        """See `Cell`."""
        reset, update, new, of_new = self._gates(of_given, of_state)
        of_update = slope.hidden * (before.hidden - new) * update * (1 - update)
        slope_new = slope.hidden * (1 - update) * (1 - new * new)
        of_reset = slope_new * of_new * reset * (1 - reset)
        given = torch.cat((of_reset, of_update, slope_new), 1)
        state = torch.cat((of_reset, of_update, slope_new * reset), 1)
        return Slopes(given, state, State(slope.hidden * update, None))

    @staticmethod
    def _gates(of_given: Tensor, of_state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Reset, update, new, and what the state gives to the new one before its reset."""
        width = of_given.shape[1] // 3
        both = (of_given[:, : 2 * width] + of_state[:, : 2 * width]).sigmoid_()
        reset, update = both.chunk(2, 1)
        of_new = of_state[:, 2 * width :]
        return reset, update, (of_given[:, 2 * width :] + reset * of_new).tanh_(), of_new
