"""A captured network: operators on numbered values, and the static facts of each value."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch.utils import _pytree as pytree

from torchtrim.records.profile import is_contiguous

From = Literal["input", "parameter", "buffer", "constant"]


class Ref(NamedTuple):
    """A placeholder for a value in an operator's arguments."""

    value: int


class NetworkValue(NamedTuple):
    """A tensor: its geometry, and its memory. Strides are in elements.

    `memory` numbers the memory, which views share. `ours` is true if the network allocates it, so that it
    does not belong to an input or parameter.
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

    @property
    def is_contiguous(self) -> bool:
        """True if the elements are contiguous in row-major order."""
        return is_contiguous(self.shape, self.strides)


class Source(NamedTuple):
    """Origin of an external value: an input leaf, by number, or a parameter, buffer or constant, by name."""

    kind: From
    key: int | str
    value: int


class Op(NamedTuple):
    """One operator, run by `module`. `outputs` has -1 for unused results and results other than tensors."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    single: bool
    module: str


class Captured(NamedTuple):
    """A network for inputs of one geometry.

    `memories`: bytes by number. `results`: returned values and constants, in the structure of `returns`.
    `updates`: buffers and inputs written at the end, by source.
    """

    ops: tuple[Op, ...]
    values: tuple[NetworkValue, ...]
    memories: tuple[int, ...]
    sources: tuple[Source, ...]
    constants: dict[str, torch.Tensor]
    results: tuple[Any, ...]
    returns: pytree.TreeSpec
    updates: tuple[tuple[Source, int], ...]
