"""Ships a loader's batches in narrow types, and widens them on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from torchtrim.data.packing import Packed, packed_in
from torchtrim.data.rebuild import rebuilt, settings_of

_LEAST = 1 << 16


class Shipped:
    """A tensor of a batch on its way: narrow until `to`, `cuda` or `cpu` gives the tensor that it was."""

    def __init__(self, packed: Packed) -> None:
        self.packed = packed

    def to(self, device: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The tensor there, bit for bit as the loader made it. A further type is applied to it there."""
        if isinstance(device, torch.dtype):
            return self.packed.widened().to(device, *args, **kwargs)
        here = {name: value for name, value in kwargs.items() if name == "non_blocking"}
        moved = self.packed.values.to(device, **here) if device is not None else self.packed.values
        wide = self.packed._replace(values=moved).widened()
        rest = {name: value for name, value in kwargs.items() if name != "non_blocking"}
        return wide.to(*args, **rest) if args or rest else wide

    def cuda(self, device: Any = None, non_blocking: bool = False) -> torch.Tensor:
        """The tensor on the device."""
        return self.to("cuda" if device is None else device, non_blocking=non_blocking)

    def cpu(self) -> torch.Tensor:
        """The tensor here."""
        return self.packed.widened()

    def pin_memory(self, *_: Any) -> Shipped:
        """The same in pinned memory; a loader with `pin_memory=True` calls it."""
        return Shipped(self.packed._replace(values=self.packed.values.pin_memory()))

    def size(self, dim: int | None = None) -> Any:
        """The sizes of the tensor, or one of them."""
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return len(self.packed.values)

    @property
    def shape(self) -> torch.Size:
        """The sizes of the tensor."""
        return self.packed.values.shape

    @property
    def dtype(self) -> torch.dtype:
        """The type that the tensor will have."""
        return self.packed.dtype


class _NarrowCollate:
    """Collates as another function does, and packs what can be packed, where that function runs."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        return tree_map(_shipped, self._collate(samples))


def _shipped(value: Any) -> Any:
    """A tensor of 64 KiB or more in the narrowest type that gives it back; all else as it is."""
    if type(value) is not torch.Tensor or value.layout != torch.strided:
        return value
    if value.numel() * value.element_size() < _LEAST:
        return value
    packed = packed_in(value)
    return value if packed is None else Shipped(packed)


def narrow(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The same loader, whose large tensors travel in the narrowest types that hold their values.

        for images, labels in narrow(loader):
            images = images.to(device, non_blocking=True)

    Batches are the same, bit for bit, once they were moved: each tensor is packed only where it comes back
    so, and that is looked at for every batch, in the workers. Until it is moved by `to`, `cuda` or `cpu`, a
    packed tensor knows its shape and type and nothing else. Goes with `Prefetcher`. Raises `UsageError` for
    what is no `DataLoader`.
    """
    found = rebuilt(loader, settings_of(loader))
    found.collate_fn = _NarrowCollate(found.collate_fn)
    return found
