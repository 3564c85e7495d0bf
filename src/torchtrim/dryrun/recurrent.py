"""Bytes that oneDNN's LSTM on the CPU keeps for backward, and needs beside its results.

Source: oneapi-src/oneDNN, src/cpu/rnn/rnn_utils.cpp (`get_good_ld`, `set_workspace_sizes`): gates, hidden
and cell states and their gradients, each from a page's beginning.
"""

from __future__ import annotations

from typing import Any

import torch

_PAGE = 4096
_LINE = 16
_ALIASES = 256
_SLACK = 16384
_FLOAT = 4


def kept_bytes(args: Any) -> int:
    """Bytes of what `aten::mkldnn_rnn_layer` gives to backward; none where gradients are off."""
    if not torch.is_grad_enabled():
        return 0
    steps, samples, inputs, hidden = _dimensions(args)
    wide = _leading(max(inputs, hidden))
    states = _pages(2 * (steps + 1) * samples * wide)
    cells = _pages(2 * (steps + 1) * samples * hidden)
    return _gates(args) + 3 * states + 2 * cells + _pages(steps * samples * _leading(hidden))


def forward(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Workspace of `aten::mkldnn_rnn_layer`: gates, and the weights in another order."""
    _, _, inputs, hidden = _dimensions(args)
    return _gates(args) + 4 * hidden * (inputs + hidden) * _FLOAT + _SLACK


def backward(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Workspace of `aten::mkldnn_rnn_layer_backward`."""
    _, _, inputs, hidden = _dimensions(args)
    padded = 4 * hidden * (_leading(inputs) + _leading(hidden)) * _FLOAT
    plain = 4 * hidden * (inputs + hidden) * _FLOAT
    return forward(func, args, kwargs, result) + (padded if padded > plain else 0)


def _dimensions(args: Any) -> tuple[int, int, int, int]:
    steps, samples, inputs = args[0].shape
    return steps, samples, inputs, args[2].shape[1]


def _gates(args: Any) -> int:
    steps, samples, _, hidden = _dimensions(args)
    return _pages(steps * samples * _leading(4 * hidden))


def _leading(length: int) -> int:
    """Elements from one row to the next: whole cache lines, and no power of two that rows would share."""
    lines = -(-length // _LINE) * _LINE
    return lines + _LINE if lines % _ALIASES == 0 else lines


def _pages(elements: int) -> int:
    return -(-elements * _FLOAT // _PAGE) * _PAGE
