"""Bytes as the allocator sees them: each storage once, however many tensors, views and entries share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtrim.stream.tombstones import Key


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The strided tensors in a value: itself, or in lists, tuples and dicts at any depth."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_of(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_of(one)


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same value with each strided tensor changed; containers are new, other things the same."""
    if isinstance(value, torch.Tensor):
        return change(value) if value.layout is torch.strided else value
    if isinstance(value, dict):
        return {name: map_tensors(one, change) for name, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(one, change) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(one, change) for one in value)
    return value


def storage_id(tensor: torch.Tensor) -> int:
    """What two tensors have in common exactly when they share a storage, while either is alive."""
    return int(tensor.untyped_storage()._cdata)


def held_bytes(values: Iterable[Any]) -> int:
    """Bytes of the storages of all tensors in the values, each once."""
    seen = {
        storage_id(tensor): tensor.untyped_storage().nbytes()
        for value in values
        for tensor in tensors_of(value)
    }
    return sum(seen.values())


def is_partial(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds more bytes alive than it shows."""
    return tensor.nbytes < tensor.untyped_storage().nbytes()


class Copies:
    """Copies of views that together show less than their storages; equal views get one copy."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._views: dict[Any, torch.Tensor] = {}
        self._made: dict[Any, torch.Tensor] = {}
        for value in values:
            for tensor in tensors_of(value):
                self._views.setdefault(_view(tensor), tensor)

    def gain(self) -> int:
        """Bytes that copying all views would free; 0 or less where it would free none."""
        shown = sum(tensor.nbytes for tensor in self._views.values())
        return held_bytes(self._views.values()) - shown

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of a view, or the tensor itself where it shows all of its storage."""
        if not is_partial(tensor):
            return tensor
        view = _view(tensor)
        if view not in self._made:
            self._made[view] = tensor.detach().clone()
        return self._made[view]


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    shape = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return storage_id(tensor), *shape


@dataclass(slots=True)
class Holding:
    """A storage, its bytes, the entries that hold it with the bytes of it that each shows, their sum.

    `looked` is how many entries there were when it was last found that they show all of it.
    """

    nbytes: int
    keys: dict[Key, int] = field(default_factory=dict)
    shown: int = 0
    looked: int | None = None

    def worth_a_look(self) -> bool:
        """Whether the entries may show less than all of the storage, and it was not just looked at."""
        if not self.keys:
            return False
        return self.shown < self.nbytes or self.looked is None or len(self.keys) <= self.looked // 2


class Accounts:
    """Which entries hold which storages, kept as entries come and go."""

    def __init__(self) -> None:
        self.holdings: dict[int, Holding] = {}
        self.bytes = 0

    def add(self, key: Key, value: Any) -> tuple[int, ...]:
        """An entry came. Returns the ids of its storages."""
        ids = []
        for tensor in (value,) if type(value) is torch.Tensor else tensors_of(value):
            if tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            number = storage._cdata
            holding = self.holdings.get(number)
            if holding is None:
                holding = self.holdings[number] = Holding(storage.nbytes())
                self.bytes += holding.nbytes
            shown = tensor.nbytes
            holding.keys[key] = holding.keys.get(key, 0) + shown
            holding.shown += shown
            ids.append(number)
        return tuple(ids)

    def remove(self, key: Key, ids: tuple[int, ...]) -> tuple[int, list[Holding]]:
        """An entry went. Returns the bytes this freed, and the storages that others still hold."""
        freed, shared = 0, []
        for number in set(ids) if len(ids) > 1 else ids:
            holding = self.holdings[number]
            holding.shown -= holding.keys.pop(key, 0)
            if holding.keys:
                shared.append(holding)
                continue
            del self.holdings[number]
            freed += holding.nbytes
        self.bytes -= freed
        return freed, shared

    def clear(self) -> None:
        """Nothing is held."""
        self.holdings.clear()
        self.bytes = 0
