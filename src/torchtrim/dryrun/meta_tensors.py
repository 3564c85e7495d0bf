"""Tensors that have an address and a size, and no memory.

They lie in one mapping of address space that the system backs with nothing until somebody writes there.
So they are plain CPU tensors for autograd, for modules and for whoever compares pointers; who reads one
by hand reads zeros.
"""

from __future__ import annotations

import functools
import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import torch

_MOST_BITS, _LEAST_BITS = 46, 36
_ALIGNMENT = 64
_NO_RESERVE = 0x4000
"""`MAP_NORESERVE` of Linux, which Python's module names from 3.13 on."""


class Blanks:
    """Makes blank tensors and knows them. Addresses are given in turn, so that living ones rarely meet."""

    def __init__(self) -> None:
        self._region = _region()
        self._size = len(self._region)
        self._base = torch.frombuffer(self._region, dtype=torch.uint8, count=1).data_ptr()
        self._next = 0
        self._sizes: dict[int, tuple[weakref.ref[Any], int]] = {}

    def tensor(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Any:
        """A blank tensor of that geometry; of what has no elements a plain one.

        Raises `RuntimeError` for one that no machine's addresses could hold.
        """
        if 0 in shape:
            return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        flat = torch.frombuffer(
            self._region, dtype=dtype, count=count, offset=self._place(count * dtype.itemsize)
        )
        return flat.as_strided(tuple(shape), tuple(strides))

    def storage(self, size: int) -> torch.UntypedStorage:
        """A blank storage of that many bytes."""
        made: torch.UntypedStorage = self.tensor((size,), (1,), torch.uint8).untyped_storage()
        return made

    def resize(self, storage: Any, size: int) -> None:
        """Give a blank storage another size: what `resized` says from now on."""
        key = storage._cdata
        gone = weakref.ref(storage, lambda _: self._sizes.pop(key, None))
        self._sizes[key] = (gone, size)

    def resized(self, storage: Any) -> int | None:
        """The bytes of a storage that was resized, None for any other."""
        known = self._sizes.get(storage._cdata)
        return None if known is None else known[1]

    def holds(self, address: int) -> bool:
        """Whether the memory at an address is blank."""
        return self._base <= address < self._base + self._size

    def _place(self, size: int) -> int:
        """Where the next `size` bytes go; from the beginning again when the addresses are used up."""
        if size > self._size:
            raise RuntimeError(f"a tensor of {size} bytes is larger than the space of addresses")
        if self._next + size > self._size:
            self._next = 0
        place = self._next
        self._next += -(-size // _ALIGNMENT) * _ALIGNMENT
        return place


@functools.cache
def blanks() -> Blanks:
    """Those of this process: a tensor stays blank from one dry run to the next."""
    return Blanks()


def _region() -> mmap.mmap:
    """The largest mapping that the system gives."""
    for bits in range(_MOST_BITS, _LEAST_BITS, -1):
        try:
            return _mapping(1 << bits)
        except (OSError, ValueError, OverflowError):
            continue
    return _mapping(1 << _LEAST_BITS)


def _mapping(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", _NO_RESERVE)
    return mmap.mmap(-1, size, flags=flags)
