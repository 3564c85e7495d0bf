"""A captured network: operators on numbered values, and what is known of each value without running."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch.utils import _pytree as pytree

From = Literal["input", "parameter", "buffer", "constant"]


class Ref(NamedTuple):
    """Stands for a value among an operator's arguments."""

    value: int


class Value(NamedTuple):
    """A tensor: its geometry, and its memory. Strides are in elements.

    `memory` numbers the memory; views share it. `ours` says that it is born inside of the network and is
    no input's or parameter's.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    memory: int
    ours: bool

    @property
    def bytes(self) -> int:
        """Bytes from the first to the last element."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize


class Source(NamedTuple):
    """Where a value comes from that the network does not make: a leaf of the inputs, by number, or a
    parameter, buffer or constant, by name."""

    kind: From
    key: int | str
    value: int


class Op(NamedTuple):
    """One operator. `outputs` has -1 for what is no tensor or is never used. `module` ran it."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    single: bool
    module: str


class Captured(NamedTuple):
    """A network for inputs of one geometry.

    `memories`: bytes by number. `results`: what it returns, as values and constants, to be put into
    `returns`. `updates`: buffers and inputs that it writes at its end, by their source.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    memories: tuple[int, ...]
    sources: tuple[Source, ...]
    constants: dict[str, torch.Tensor]
    results: tuple[Any, ...]
    returns: pytree.TreeSpec
    updates: tuple[tuple[Source, int], ...]
