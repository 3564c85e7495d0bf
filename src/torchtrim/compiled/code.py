"""Code that Inductor wrote for one graph, and what goes into it and out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch


class Spec(NamedTuple):
    """Sizes, strides, type and device of a tensor."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Spec:
        """Return a tensor's layout; symbolic sizes are those of the largest call seen."""
        sizes, strides = (tuple(map(hint, each)) for each in (tensor.shape, tensor.stride()))
        return cls(sizes, strides, tensor.dtype, tensor.device)

    def empty(self) -> torch.Tensor:
        """Return an uninitialized tensor like this."""
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device=self.device)


class Code(NamedTuple):
    """Inductor's code for a forward or backward graph.

    `inputs`: each input's name and spec, or its number. A backward takes what the forward of its graph
    returns under the same name.
    """

    source: str
    inputs: tuple[tuple[str, Spec | int | None], ...]
    outputs: tuple[str, ...]
    backward: bool
    constants: dict[str, Spec]


_LARGEST: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()
"""By a traced program's shapes, the symbols of its sizes in the largest call seen."""


def note_sizes(values: Sequence[Any], numbers: Sequence[Any]) -> None:
    """Have `hint` take these numbers for the symbols among some values of a traced program."""
    for value, number in zip(values, numbers, strict=True):
        if isinstance(value, torch.SymInt) and isinstance(number, int):
            _LARGEST.setdefault(value.node.shape_env, {})[value.node.expr] = number


def hint(size: int | torch.SymInt) -> int:
    """Return a size as a number; a symbol has its value in the largest call seen."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    number = size.node.expr.subs(_LARGEST.get(size.node.shape_env, {}))
    return int(size.node.hint if number.free_symbols else number)
