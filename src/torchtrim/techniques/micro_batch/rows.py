"""A part of a batch: which samples are in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch


class Along(NamedTuple):
    """How samples lie in a tensor of all of them: along which dimension, and its dimensions from the one
    with the longest stride on. A part of one sample does not tell that."""

    dim: int
    order: tuple[int, ...]


def order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor, from the one with the longest stride on."""
    return tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


class Rows(NamedTuple):
    """Samples `first <= i < last` of `whole`."""

    first: int
    last: int
    whole: int

    @property
    def number(self) -> int:
        """How many samples."""
        return self.last - self.first

    def whole_shape(self, shape: tuple[int, ...], dim: int) -> list[int]:
        """The shape that a part's tensor has for all samples, which lie along `dim`."""
        found = list(shape)
        found[dim] = found[dim] * self.whole // self.number
        return found

    def room(self, part: torch.Tensor, along: Along) -> torch.Tensor:
        """Memory for what all samples have."""
        order, shape = along.order, self.whole_shape(tuple(part.shape), along.dim)
        made = torch.empty([shape[d] for d in order], dtype=part.dtype, device=part.device)
        return made.permute([order.index(d) for d in range(part.dim())])

    def mine(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The view of these samples of a tensor of all; several rows may be of one sample."""
        each = tensor.shape[dim] // self.whole
        return tensor.narrow(dim, self.first * each, self.number * each)

    def take(self, tensor: torch.Tensor, dim: int, times: int) -> torch.Tensor:
        """These samples' part of a tensor of all, in which they come again at each of so many times."""
        if times == 1:
            return self.mine(tensor, dim)
        return self.mine(apart(tensor, dim, times), dim + 1).flatten(dim, dim + 1)

    def put(self, tensor: torch.Tensor, dim: int, times: int, part: torch.Tensor) -> None:
        """Write these samples' part of a tensor of all."""
        if times == 1:
            self.mine(tensor, dim).copy_(part)
        else:
            there = self.mine(apart(tensor, dim, times), dim + 1)
            there.copy_(apart(part, dim, times))


def apart(tensor: torch.Tensor, dim: int, times: int) -> torch.Tensor:
    """The view in which a dimension is two, of times and of samples."""
    found: torch.Tensor = tensor.unflatten(dim, (times, -1))  # type: ignore[no-untyped-call]
    return found


def parts_of(whole: int, parts: int) -> Iterator[Rows]:
    """The parts of a batch, all of one size, but the last may be smaller."""
    size = -(-whole // parts)
    for first in range(0, whole, size):
        yield Rows(first, min(first + size, whole), whole)


def split_dim(part: tuple[int, ...], whole: tuple[int, ...], times: int) -> int | None:
    """The dimension that is `times` as long with so many times the samples, -1 for none at all, and None
    where that is not how the shapes differ."""
    if len(part) != len(whole):
        return None
    dims = [d for d, (a, b) in enumerate(zip(part, whole, strict=True)) if a != b]
    if not dims:
        return -1
    return dims[0] if len(dims) == 1 and whole[dims[0]] == times * part[dims[0]] else None
