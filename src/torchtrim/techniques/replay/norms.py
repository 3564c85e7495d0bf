"""Which batch norms scale and shift alone when they run again, and what that takes."""

from __future__ import annotations

from math import prod

from torchtrim.records.profile import Operator

TYPES = ("float32", "float64")
_ROWS, _CHANNELS_LAST = 0.3, 0.65
"""What scaling and shifting takes, as shares of the whole: on an Intel Xeon, for 16 x 64 x 56 x 56, 1.7 of
6.5 ms, with channels last 1.8 of 2.9; for smaller inputs 0.2 to 0.37, and 0.5 to 0.65; where a channel has
one element of each sample, which is both, 0.55 and more."""
_SPATIAL = (4, 5)
"""How many dimensions what has channels last has."""


def share(norm: Operator, device: str) -> float:
    """What it takes to run a batch norm again, as a share of what it took."""
    given = norm.inputs[0]
    trains = len(norm.outputs) > 1 and prod(norm.outputs[1].shape) > 0
    if device != "cpu" or given.dtype not in TYPES or not trains:
        return 1.0
    if _is_packed(given.shape, given.strides) and prod(given.shape[2:]) > 1:
        return _ROWS
    return _CHANNELS_LAST if is_dense(given.shape, given.strides) else 1.0


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements lie one after another, by rows or, of pictures and volumes, with channels last."""
    if _is_packed(shape, strides):
        return True
    last = (0, *range(2, len(shape)), 1)
    reordered = tuple(shape[d] for d in last), tuple(strides[d] for d in last)
    return len(shape) in _SPATIAL and _is_packed(*reordered)


def _is_packed(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
