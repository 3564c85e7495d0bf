"""Transfer of a loader's batches in narrow types, restored on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from torchtrim.data.parts import Packed, packed_in
from torchtrim.data.rebuild import rebuilt, settings_of

_LEAST = 1 << 16  # Arbitrary; smaller tensors cost more to check than to copy.


class Shipped:
    """A narrowed tensor of a batch. `to`, `cuda` and `cpu` restore the original tensor."""

    def __init__(self, packed: Packed) -> None:
        self.packed = packed

    def to(self, device: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the tensor on the device, bit for bit as loaded, then cast if a dtype is given."""
        if isinstance(device, torch.dtype):
            return self.packed.widened().to(device, *args, **kwargs)
        values, non_blocking = self.packed.values, kwargs.pop("non_blocking", False)
        moved = values if device is None else values.to(device, non_blocking=non_blocking)
        wide = self.packed._replace(values=moved).widened()
        return wide.to(*args, **kwargs) if args or kwargs else wide

    def cuda(self, device: Any = None, non_blocking: bool = False) -> torch.Tensor:
        """Return the tensor on the CUDA device."""
        return self.to("cuda" if device is None else device, non_blocking=non_blocking)

    def cpu(self) -> torch.Tensor:
        """Return the tensor on the CPU."""
        return self.packed.widened()

    def pin_memory(self, *_: Any) -> Shipped:
        """Return a copy in pinned memory; called by a loader with `pin_memory=True`."""
        return Shipped(self.packed._replace(values=self.packed.values.pin_memory()))

    def size(self, dim: int | None = None) -> Any:
        """Return the shape of the tensor, or one of its sizes."""
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return len(self.packed.values)

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""
        return self.packed.values.shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of the restored tensor."""
        return self.packed.dtype


class _NarrowCollate:
    """A collate function that narrows the tensors of another's batches, in the worker."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        return tree_map(_shipped, self._collate(samples))


def _shipped(value: Any) -> Any:
    """Narrow a tensor of 64 KiB or more if that is exact; return anything else unchanged."""
    if type(value) is not torch.Tensor or value.layout != torch.strided:
        return value
    if value.numel() * value.element_size() < _LEAST:
        return value
    packed = packed_in(value)
    return value if packed is None else Shipped(packed)


def narrow(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return the same loader with large tensors narrowed during transfer.

        for images, labels in narrow(loader):
            images = images.to(device, non_blocking=True)

    Batches are identical, bit for bit, after they are moved: a tensor is narrowed only if its values survive,
    which workers check for every batch. Until `to`, `cuda` or `cpu` moves it, a narrowed tensor only knows
    its shape and dtype. Works with `Prefetcher`. Raises `UsageError` if the loader is not a `DataLoader`.
    """
    found = rebuilt(loader, settings_of(loader))
    found.collate_fn = _NarrowCollate(found.collate_fn)
    return found
