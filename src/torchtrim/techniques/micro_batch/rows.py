"""Rows of a batch, and the tensors and containers that hold them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from torchtrim.core.tuples import with_items

Leaves = list[Any]


def leaves_of(value: Any) -> Leaves:
    """Return the leaves of nested tuples, lists, dicts and dataclasses, in order."""
    found: Leaves = []
    mapped(value, found.append)
    return found


def filled(value: Any, leaves: Iterable[Any]) -> Any:
    """Return the containers with other leaves, in the order of `leaves_of`."""
    rest = iter(leaves)
    return mapped(value, lambda _: next(rest))


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply the function to each leaf of nested containers and return a copy."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple):
        return with_items(value, [mapped(item, function) for item in value])
    if isinstance(value, list):
        twin: Any = copy.copy(value)
        twin[:] = [mapped(item, function) for item in value]
        return twin
    if isinstance(value, dict):
        twin = copy.copy(value)
        for key, item in value.items():
            twin[key] = mapped(item, function)
        return twin
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(twin, field.name, mapped(getattr(value, field.name), function))
        return twin
    return function(value)


class SampleLayout(NamedTuple):
    """Dimension of the samples in a tensor of the whole batch, and its dimensions by descending stride."""

    dim: int
    order: tuple[int, ...]


def order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of a tensor by descending stride."""
    return tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


class SampleRows(NamedTuple):
    """Samples `first <= i < last` of `whole`."""

    first: int
    last: int
    whole: int

    @property
    def number(self) -> int:
        """Number of samples."""
        return self.last - self.first

    def whole_shape(self, shape: tuple[int, ...], dim: int) -> list[int]:
        """Return the shape of a part's tensor for all samples, which are along `dim`."""
        found = list(shape)
        found[dim] = found[dim] * self.whole // self.number
        return found

    def room(self, part: torch.Tensor, along: SampleLayout) -> torch.Tensor:
        """Allocate memory for all samples."""
        order, shape = along.order, self.whole_shape(tuple(part.shape), along.dim)
        made = torch.empty([shape[d] for d in order], dtype=part.dtype, device=part.device)
        return made.permute([order.index(d) for d in range(part.dim())])

    def mine(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the view of these samples. A sample may have several rows."""
        each = tensor.shape[dim] // self.whole
        return tensor.narrow(dim, self.first * each, self.number * each)

    def take(self, tensor: torch.Tensor, dim: int, times: int) -> torch.Tensor:
        """Return these samples of a tensor. The batch repeats for each of `times` steps."""
        if times == 1:
            return self.mine(tensor, dim)
        return self.mine(apart(tensor, dim, times), dim + 1).flatten(dim, dim + 1)

    def put(self, tensor: torch.Tensor, dim: int, times: int, part: torch.Tensor) -> None:
        """Write these samples into a tensor of all samples."""
        if times == 1:
            self.mine(tensor, dim).copy_(part)
        else:
            there = self.mine(apart(tensor, dim, times), dim + 1)
            there.copy_(apart(part, dim, times))


def apart(tensor: torch.Tensor, dim: int, times: int) -> torch.Tensor:
    """Return a view with the dimension split into times and samples."""
    found: torch.Tensor = tensor.unflatten(dim, (times, -1))  # type: ignore[no-untyped-call]
    return found


def parts_of(whole: int, parts: int) -> Iterator[SampleRows]:
    """Yield the parts of a batch, equal in size except for the last."""
    size = -(-whole // parts)
    for first in range(0, whole, size):
        yield SampleRows(first, min(first + size, whole), whole)


def split_dim(part: tuple[int, ...], whole: tuple[int, ...], times: int) -> int | None:
    """Return the dimension that grows by the factor `times`, -1 if all are equal, else None."""
    if len(part) != len(whole):
        return None
    dims = [d for d, (a, b) in enumerate(zip(part, whole, strict=True)) if a != b]
    if not dims:
        return -1
    return dims[0] if len(dims) == 1 and whole[dims[0]] == times * part[dims[0]] else None
