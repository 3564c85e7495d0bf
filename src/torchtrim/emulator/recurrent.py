"""Recurrent layers as on CUDA: cuDNN's one operator for all layers, with the CPU's values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._C import DispatchKey

from torchtrim.emulator.attention import drawing_again, kept_with, numbered, plain_kernels
from torchtrim.syncs.base import Citation

_aten: Any = torch.ops.aten
_NUMBER_BYTES = 8
MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")
"""Operators by cuDNN's number of their cell (`cudnnRNNMode_t`)."""
_GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
SOURCES = (
    Citation(
        repository="MetaX-MACA/mcPytorch",
        ref="b3db5eed",
        path="aten/src/ATen/native/RNN.cpp",
        line=1429,
        note="a layer whose input cuDNN accepts runs there, of release 2.4",
    ),
    Citation(
        repository="MetaX-MACA/mcPytorch",
        ref="b3db5eed",
        path="aten/src/ATen/native/cudnn/RNN.cpp",
        line=1571,
        note="in training the reserve is kept for backward",
    ),
    Citation(
        repository="pytorch/pytorch",
        ref="v2.13.0",
        path="tools/autograd/derivatives.yaml",
        line=2805,
        note="input, weights, states, output, reserve and weight buffer are saved",
    ),
)
"""Lines that decide which layers run in cuDNN and which tensors they save."""


class _Call(NamedTuple):
    """A call of `_cudnn_rnn`, in the order of its schema."""

    tensor: torch.Tensor
    weight: list[torch.Tensor]
    weight_stride0: int
    weight_buf: torch.Tensor | None
    hx: torch.Tensor
    cx: torch.Tensor | None
    mode: int
    hidden_size: int
    proj_size: int
    num_layers: int
    batch_first: bool
    dropout: float
    train: bool
    bidirectional: bool
    batch_sizes: list[int]
    dropout_state: torch.Tensor | None

    def on_cpu(self) -> tuple[torch.Tensor, ...]:
        """Run the CPU's composite operator, and return output and states."""
        states: Any = self.hx if self.cx is None else [self.hx, self.cx]
        biased = self.weight_stride0 - bool(self.proj_size) == 4
        options = (self.num_layers, self.dropout, self.train, self.bidirectional)
        rest = (list(self.weight), biased, *options)
        packet = getattr(_aten, MODES[self.mode])
        if self.batch_sizes:
            sizes = torch.tensor(self.batch_sizes, device="cpu")
            return _plain(packet.data, self.tensor, sizes, states, *rest)
        return _plain(packet.input, self.tensor, states, *rest, self.batch_first)


def reserve_bytes(name: str, out: torch.Tensor, hidden: int, directions: int) -> int:
    """Return an estimate of cuDNN's reserve: gates and states at each position of all layers.

    `directions`: of all layers. The real size is not public (`cudnnGetRNNTempSpaceSizes`).
    """
    positions = out.numel() // out.shape[-1]
    return max(positions * directions * hidden * (_GATES[name] + 2) * out.itemsize, _NUMBER_BYTES)


def _plain(func: Any, *args: Any) -> tuple[torch.Tensor, ...]:
    results: tuple[torch.Tensor, ...] = func._op_dk(DispatchKey.CompositeImplicitAutograd, *args)
    return results


def is_cudnn_layer(tensor: torch.Tensor) -> bool:
    """Return True if cuDNN accepts the input of a layer: `cudnn_is_acceptable`."""
    types = (torch.float16, torch.float32, torch.float64)
    return torch.backends.cudnn.enabled and tensor.dtype in types and tensor.numel() > 0


def cudnn_layer(
    name: str,
    tensor: torch.Tensor,
    states: list[torch.Tensor],
    weights: list[torch.Tensor],
    biased: bool,
    *options: Any,
    sizes: list[int] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Run a recurrent layer by cuDNN's operator.

    `options`: layers, dropout, whether it trains, both directions, batch first.
    """
    layers, dropout, trains, both, first = options
    cell = states[1] if name == "lstm" else None
    hidden = (cell if cell is not None else states[0]).shape[-1]
    projected = states[0].shape[-1] if states[0].shape[-1] != hidden else 0
    stride = (4 if biased else 2) + bool(projected)
    found = _aten._cudnn_rnn(
        *(tensor, weights, stride, None, states[0], cell, MODES.index(name), hidden, projected),
        *(layers, first, dropout, trains, both, sizes or [], None),
    )
    return tuple(found[:3] if name == "lstm" else found[:2])


def cudnn_rnn(*given: Any) -> tuple[torch.Tensor, ...]:
    """All layers at once. The weight buffer is the parameters themselves, so the one returned is empty."""
    call = _Call(*given)
    number = numbered(call.dropout if call.train else 0.0)
    # oneDNN's LSTM rounds otherwise in inference, on processors without AVX-512.
    with plain_kernels(grad=call.train):
        out, *states = (result.detach() for result in call.on_cpu())
    directions = call.num_layers * (1 + call.bidirectional)
    size = reserve_bytes(MODES[call.mode], out, call.hidden_size, directions) if call.train else 0
    reserve = call.tensor.new_zeros(size, dtype=torch.uint8)
    if call.train:
        reserve[:_NUMBER_BYTES].view(torch.int64).fill_(number)
    cell = states[1] if call.cx is not None else call.tensor.new_empty(0)
    return out, states[0], cell, kept_with(reserve, number), call.tensor.new_empty(0)


def cudnn_rnn_backward(*given: Any) -> tuple[Any, ...]:
    """The gradients of `cudnn_rnn`, by the CPU's autograd on a second forward pass."""
    # The forward pass' arguments, with its output and three gradients after the states.
    call, gradients, reserve = _Call(*given[:6], *given[10:20]), given[7:10], given[20]
    if not call.train:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")
    number = int(reserve[:_NUMBER_BYTES].view(torch.int64)[0])
    with plain_kernels(grad=True), drawing_again(number):
        source, first, *rest = inputs = [
            one.detach().requires_grad_()
            for one in (call.tensor, call.hx, call.cx)
            if one is not None
        ]
        weights = [one.detach().requires_grad_() for one in call.weight]
        again = call._replace(tensor=source, weight=weights, hx=first, cx=[*rest, None][0])
        found = _gradients(again.on_cpu(), gradients, [*inputs, *weights])
    of_states = [*found[1 : len(inputs)], None][:2]
    return found[0], *of_states, found[len(inputs) :]


def _gradients(
    results: tuple[torch.Tensor, ...],
    given: tuple[torch.Tensor | None, ...],
    inputs: list[torch.Tensor],
) -> list[torch.Tensor | None]:
    pairs = [(out, one) for out, one in zip(results, given, strict=False) if one is not None]
    outs, gradients = zip(*pairs, strict=True)
    return list(torch.autograd.grad(outs, inputs, gradients, allow_unused=True))


KERNELS: dict[str, Callable[..., Any]] = {
    "_cudnn_rnn": cudnn_rnn,
    "_cudnn_rnn_backward": cudnn_rnn_backward,
}
"""Kernels for the CPU of cuDNN's recurrent operators."""
