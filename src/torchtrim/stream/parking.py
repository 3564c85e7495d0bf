"""Storages that are spilled: one storage at a time, with all tensors that share it, back bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from torchtrim.stream.spill import Spill
from torchtrim.stream.storages import map_tensors, storage_id, tensors_of
from torchtrim.stream.tombstones import Key


@dataclass(frozen=True, slots=True)
class Parked:
    """Replaces a tensor while its storage is spilled: which storage, and the tensor's layout in it."""

    blob: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(slots=True)
class _Blob:
    token: Any
    nbytes: int
    device: torch.device
    keys: set[Key] = field(default_factory=set)


class Parking:
    """Spilled storages by number, and which entries need each."""

    def __init__(self, spill: Spill) -> None:
        self._spill = spill
        self._blobs: dict[int, _Blob] = {}
        self._next = 0
        self.bytes = 0

    def put(self, tensor: torch.Tensor) -> int:
        """Spill the whole storage of a tensor. Returns its number; raises `SpillFailed`."""
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        with torch.no_grad():
            flat.set_(storage, 0, (storage.nbytes(),), (1,))
        token = self._spill.put(flat)
        number, self._next = self._next, self._next + 1
        self._blobs[number] = _Blob(token, storage.nbytes(), tensor.device)
        self.bytes += storage.nbytes()
        return number

    def park(self, number: int, storage: int, key: Key, value: Any) -> Any:
        """A value whose tensors on that storage are replaced by `Parked`."""
        self._blobs[number].keys.add(key)

        def replace(tensor: torch.Tensor) -> Any:
            if storage_id(tensor) != storage:
                return tensor
            size, stride = tuple(map(int, tensor.shape)), tensor.stride()
            return Parked(number, tensor.dtype, int(tensor.storage_offset()), size, stride)

        return map_tensors(value, replace)

    def fetch(self, number: int) -> tuple[torch.UntypedStorage, set[Key]]:
        """A storage with its bytes, on the device where it was, and the entries that need it."""
        blob = self._blobs[number]
        data = self._spill.get(blob.token)
        data = data.to(blob.device, copy=data.device == blob.device)
        self._forget(number)
        return data.untyped_storage(), blob.keys

    def leave(self, key: Key, value: Any) -> None:
        """An entry with parked tensors is gone; storages that nobody needs are dropped."""
        for number in blobs_of(value):
            keys = self._blobs[number].keys
            keys.discard(key)
            if not keys:
                self._forget(number)

    def _forget(self, number: int) -> None:
        blob = self._blobs.pop(number)
        self.bytes -= blob.nbytes
        self._spill.drop(blob.token)


def blobs_of(value: Any) -> set[int]:
    """Numbers of the spilled storages that a value needs."""
    if isinstance(value, Parked):
        return {value.blob}
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return {number for one in value for number in blobs_of(one)}
    return set()


def unpark(value: Any, number: int, storage: torch.UntypedStorage) -> Any:
    """The value with its `Parked` of one storage made tensors again."""
    if isinstance(value, Parked):
        if value.blob != number:
            return value
        device = storage.device
        with torch.no_grad():
            empty = torch.empty(0, dtype=value.dtype, device=device)
            return empty.set_(storage, value.offset, value.size, value.stride)
    if isinstance(value, dict):
        return {name: unpark(one, number, storage) for name, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(unpark(one, number, storage) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(unpark(one, number, storage) for one in value)
    return value


def tensor_on(value: Any, storage: int) -> torch.Tensor:
    """A tensor of the value that uses a storage."""
    return next(tensor for tensor in tensors_of(value) if storage_id(tensor) == storage)
