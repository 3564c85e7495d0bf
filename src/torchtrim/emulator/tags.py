"""Tags of storages on the emulated device or in pinned host memory.

Tensors are plain CPU tensors. Storages carry the tags, so views, `.data` and in-place operators just work.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from torchtrim.dispatch.storages import PLAIN, parts_of

DEVICE = torch.device("cuda", 0)
HOST = torch.device("cpu")
HELD = -1
_NO_STORAGE = (NotImplementedError, RuntimeError)


class _Tag(weakref.ref[Any]):
    __slots__ = ("bytes", "key", "number")
    key: int
    number: int
    bytes: int


class Tags:
    """Tags by the address of the C++ storage.

    `made`: how many allocations there were. `events`: numbers of allocations on the device with their bytes,
    or -1 at their end; `HELD` is a library's workspace, which no tensor owns. Readers may clear it.
    """

    def __init__(self) -> None:
        self.events: list[tuple[int, int]] = []
        self._device: dict[int, _Tag] = {}
        self._pinned: dict[int, _Tag] = {}
        self._undecided: dict[int, _Tag] = {}
        self.made = 0
        self._heir: tuple[_Tag, _Tag] | None = None
        self._on_free = self._freed

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor (for a placeholder: its source) is on the emulated device."""
        if (made_from := getattr(type(tensor), "made_from", None)) is not None:
            return self.on_device(made_from(tensor))
        try:
            on = tensor.untyped_storage()._cdata in self._device
            return on or (type(tensor) not in PLAIN and self._has_part_on_device(tensor))
        except _NO_STORAGE:
            return self._has_part_on_device(tensor)
        except ValueError:  # A lazy module's parameter, which does not support the query.
            with torch._C.DisableTorchFunctionSubclass():
                return tensor.untyped_storage()._cdata in self._device

    def _has_part_on_device(self, tensor: torch.Tensor) -> bool:
        """Check the parts of a wrapper subclass, whose own storage is empty."""
        return any(part is not tensor and self.on_device(part) for part in parts_of(tensor))

    def holds(self, storage: Any) -> bool:
        """Return True if an untyped storage is on the emulated device."""
        return storage._cdata in self._device

    def storage_at(self, address: int) -> Any:
        """Return the device storage that starts at an address, or None."""
        living = (tag() for tag in list(self._device.values()))
        return next((s for s in living if s is not None and s.data_ptr() == address), None)

    def put(self, tensor: torch.Tensor) -> None:
        """Tag the tensor's storage as on the device."""
        try:
            storage = tensor.untyped_storage()
        except _NO_STORAGE:
            for part in parts_of(tensor):
                if part is not tensor:
                    self.put(part)
            return
        self.put_storage(storage)

    def put_storage(self, storage: Any) -> None:
        """Tag a storage as on the device."""
        key = storage._cdata
        if key in self._device:
            return
        self._undecided.pop(key, None)
        tag = self._device[key] = _Tag(storage, self._on_free)
        tag.key = key
        self._allocated(tag, storage.nbytes())

    def resized(self, storage: Any) -> None:
        """Record that a storage may have been resized, which ends its old allocation."""
        tag = self._device.get(storage._cdata)
        if tag is not None and tag.bytes != storage.nbytes():
            self.events.append((tag.number, -1))
            self._allocated(tag, storage.nbytes())

    def _allocated(self, tag: _Tag, size: int) -> None:
        tag.number, tag.bytes = self.made, size
        self.made += 1
        self.events.append((tag.number, size))

    def hold(self, size: int) -> None:
        """Record bytes that a library keeps for good, if there are any."""
        if size:
            self.events.append((HELD, size))

    def number(self, tensor: torch.Tensor) -> int:
        """Return the number of the tensor's allocation, or -1 for one on the host."""
        tag = self._device.get(tensor.untyped_storage()._cdata)
        return -1 if tag is None else tag.number

    def may_replace(self, made: torch.Tensor, first: Any) -> None:
        """Note that on a device `made` is in the place of `first`, if that has no other owner.

        It has none if it is freed next. Under a dispatch mode autograd makes another tensor.
        """
        heir = self._device.get(made.untyped_storage()._cdata)
        known = self._device.get(first.untyped_storage()._cdata)
        if heir is not None and known is not None and heir.bytes == known.bytes:
            self._heir = heir, known

    def take(self, tensor: torch.Tensor) -> None:
        """Remove the tag of the tensor's storage: it is on the host."""
        if (tag := self._device.get(tensor.untyped_storage()._cdata)) is not None:
            self._freed(tag)

    def pin(self, tensor: torch.Tensor) -> None:
        """Tag the tensor's storage as pinned."""
        _mark(self._pinned, tensor)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor is in pinned host memory."""
        return _marked(self._pinned, tensor)

    def leave_open(self, tensor: torch.Tensor) -> None:
        """Leave the tensor's device open: the device, if it is used with a tensor on it."""
        _mark(self._undecided, tensor)

    def any_open(self) -> bool:
        """Return True if the device of some tensor is still open."""
        return bool(self._undecided)

    def is_open(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor's device is still open."""
        return _marked(self._undecided, tensor)

    def _freed(self, tag: _Tag) -> None:
        if self._device.get(tag.key) is not tag:
            return
        del self._device[tag.key]
        heir, first = self._heir or (tag, None)
        if first is tag and self.events[-1:] == [(heir.number, heir.bytes)]:
            self.events.pop()
            heir.number = tag.number
        else:
            self.events.append((tag.number, -1))


def _mark(marks: dict[int, _Tag], tensor: torch.Tensor) -> None:
    try:
        storage = tensor.untyped_storage()
    except _NO_STORAGE:
        return

    def freed(tag: _Tag) -> None:
        if marks.get(tag.key) is tag:
            del marks[tag.key]

    tag = marks[storage._cdata] = _Tag(storage, freed)
    tag.key = storage._cdata


def _marked(marks: dict[int, _Tag], tensor: torch.Tensor) -> bool:
    if not marks:
        return False
    try:
        return tensor.untyped_storage()._cdata in marks
    except _NO_STORAGE:
        return False
