"""Memory whose values nobody may rely on, and work on tensors that no mode and no autograd sees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

_BYTE = 0xFF
"""All ones is not a number in every floating type, and -1 in every signed one."""


class Shape(NamedTuple):
    """The layout of a tensor in its storage."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@contextlib.contextmanager
def unowned() -> Iterator[None]:
    """What runs here is the device's own work: no mode, no subclass and no autograd sees it."""
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        yield


def shape_of(tensor: torch.Tensor) -> Shape:
    """The layout of a tensor in its storage."""
    return Shape(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def alias(storage: Any, shape: Shape) -> torch.Tensor:
    """A tensor in a storage, with a version of its own: to be called within `unowned`."""
    return torch.empty(0, dtype=shape.dtype, device="cpu").set_(
        storage, shape.offset, shape.size, shape.stride
    )


def copy_of(storage: Any, *, poisoned: bool = False) -> Any:
    """Another storage with the same bytes, or with poison: to be called within `unowned`."""
    if poisoned:
        size = (storage.nbytes(),)
        return torch.full(size, _BYTE, dtype=torch.uint8, device="cpu").untyped_storage()
    return _bytes(storage).clone().untyped_storage()


def poison(tensor: torch.Tensor) -> None:
    """Fill a new tensor's storage with what nobody may rely on; a boolean one with True."""
    with unowned():
        own = _bytes(tensor.untyped_storage())
        own.fill_(1 if tensor.dtype is torch.bool else _BYTE)


def _bytes(storage: Any) -> torch.Tensor:
    return alias(storage, Shape(torch.uint8, (storage.nbytes(),), (1,), 0))
