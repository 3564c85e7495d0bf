"""Code that Inductor wrote for one graph, and what goes into it and out of it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Spec(NamedTuple):
    """Sizes, strides, type and device of a tensor."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Spec:
        """Return a tensor's; of a symbolic size, the number of the recorded call."""
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


def hint(size: int | torch.SymInt) -> int:
    """Return a size as a number: of a symbol, that of the recorded call."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
