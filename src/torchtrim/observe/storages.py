"""Births and deaths of storages, told by weak references to them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch


class _Watched(weakref.ref[Any]):
    """A weak reference that knows which storage it watches."""

    __slots__ = ("key",)
    key: int


class Life:
    """One storage: `bytes`, and alive during operators `birth <= i < death`."""

    __slots__ = ("birth", "bytes", "death", "device", "kind", "name")

    def __init__(self, size: int, birth: int, device: str) -> None:
        self.bytes = size
        self.birth = birth
        self.death = -1
        self.device = device
        self.kind = ""
        self.name = ""


class Storages:
    """All storages seen; `lives` by number, the living by the address of their C++ storage.

    `clock` is the number of the operator that runs next. Bytes alive are kept for each device type.
    """

    def __init__(self) -> None:
        self.lives: list[Life] = []
        self.clock = 0
        self.live_bytes = 0
        self.peak_bytes = 0
        self._living: dict[int, tuple[_Watched, int]] = {}

    def see(self, tensor: torch.Tensor, birth: int) -> int:
        """Number of the tensor's storage, which is born at `birth` if it is new; -1 if it has none."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return -1
        key = storage._cdata
        known = self._living.get(key)
        size = storage.nbytes()
        if known is not None:
            number = known[1]
            if self.lives[number].bytes == size:
                return number
            self._end(number)
        return self._begin(storage, key, size, birth, str(storage.device))

    def number(self, tensor: torch.Tensor) -> int:
        """Number of a storage that was seen and lives, else -1."""
        try:
            known = self._living.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return -1
        return known[1] if known is not None else -1

    def note_peak(self) -> None:
        """Count what is alive now towards the peak."""
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes

    def forget(self) -> None:
        """Stop watching; those alive stay without a death."""
        self._living.clear()

    def _begin(self, storage: Any, key: int, size: int, birth: int, device: str) -> int:
        number = len(self.lives)
        watched = _Watched(storage, self._died)
        watched.key = key
        self.lives.append(Life(size, birth, device))
        self._living[key] = (watched, number)
        self.live_bytes += size
        return number

    def _end(self, number: int) -> None:
        life = self.lives[number]
        life.death = self.clock
        self.live_bytes -= life.bytes

    def _died(self, watched: Any) -> None:
        known = self._living.get(watched.key)
        if known is not None and known[0] is watched:
            del self._living[watched.key]
            self._end(known[1])


def reachable_tensors() -> Iterable[torch.Tensor]:
    """Every strided tensor that Python can reach, found through the garbage collector."""
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            yield thing
            if thing.is_leaf and thing.grad is not None:
                yield thing.grad
