"""Tensors with an address and a size, but no memory.

They share one mapping of address space, which the system backs with pages only after a write. So they are
plain CPU tensors to autograd, modules and code that compares pointers; reading one gives zeros.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import torch

_MOST_BITS, _LEAST_BITS = 46, 36
"""64 TiB is half of what Linux gives a process on x86-64; below 64 GiB large models do not fit."""
_ALIGNMENT = 64
"""The alignment of torch's CPU allocator (`c10::gAlignment`)."""

_NO_RESERVE = 0x4000
"""Linux's `MAP_NORESERVE`, which Python's `mmap` exports from 3.13 on."""


class Blanks:
    """A factory of meta tensors. Addresses are assigned round-robin, so live tensors rarely overlap."""

    def __init__(self) -> None:
        self._region = _region()
        self._size = len(self._region)
        self._base = torch.frombuffer(self._region, dtype=torch.uint8, count=1).data_ptr()
        self._next = 0
        self._sizes: dict[int, tuple[weakref.ref[Any], int]] = {}

    def tensor(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Any:
        """Return a meta tensor of that geometry, or a plain one if it has no elements.

        Raises `RuntimeError` for a tensor larger than the address space.
        """
        if 0 in shape:
            return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        offset = self._place(count * dtype.itemsize)
        flat = torch.frombuffer(self._region, dtype=dtype, count=count, offset=offset)
        return flat.as_strided(tuple(shape), tuple(strides))

    def storage(self, size: int) -> torch.UntypedStorage:
        """Return a meta storage of that many bytes."""
        storage: torch.UntypedStorage = self.tensor((size,), (1,), torch.uint8).untyped_storage()
        return storage

    def resize(self, storage: Any, size: int) -> None:
        """Set the size that `resized` reports for a meta storage."""
        key = storage._cdata
        self._sizes[key] = weakref.ref(storage, lambda _: self._sizes.pop(key, None)), size

    def resized(self, storage: Any) -> int | None:
        """Return the bytes of a resized storage, None for any other."""
        known = self._sizes.get(storage._cdata)
        return None if known is None else known[1]

    def holds(self, address: int) -> bool:
        """Return True if the address belongs to a meta tensor."""
        return self._base <= address < self._base + self._size

    def _place(self, size: int) -> int:
        if size > self._size:
            raise RuntimeError(f"a tensor of {size} bytes is larger than the address space")
        if self._next + size > self._size:
            self._next = 0
        place = self._next
        self._next += -(-size // _ALIGNMENT) * _ALIGNMENT
        return place


@functools.cache
def blanks() -> Blanks:
    """Return the process-wide factory: meta tensors stay valid from one dry run to the next."""
    return Blanks()


def _region() -> mmap.mmap:
    """Map as much address space as the system allows."""
    options: dict[str, Any] = {}
    if hasattr(mmap, "MAP_PRIVATE"):
        reserve = getattr(mmap, "MAP_NORESERVE", _NO_RESERVE)
        options["flags"] = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserve
    for bits in range(_MOST_BITS, _LEAST_BITS, -1):
        with contextlib.suppress(OSError, ValueError, OverflowError):
            return mmap.mmap(-1, 1 << bits, **options)
    return mmap.mmap(-1, 1 << _LEAST_BITS, **options)
