"""Find the tensors of a state and count their bytes as the allocator does, each storage once."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torchtrim.stream.tombstones import Key

Path = tuple[Any, ...]
_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType)
ANY = "*"


class SequenceIndex(int):
    """An index into a list or tuple, as part of a path."""

    def __repr__(self) -> str:
        return f"[{int(self)}]"


def tensors_in(state: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    """Iterate over the tensors that an object holds, with their paths.

    Visits dicts, lists, tuples, sets, deques and attributes of objects, each once. Skips modules; if `state`
    itself is a module, skips its parameters, buffers and submodules.
    """
    yield from _walk(state, (), set(), top=True)


def pattern_of(path: Path) -> str:
    """Format a path with `*` for numbers: `('outputs', 3, 'mask', [1])` is `outputs.*.mask[1]`."""
    words = ""
    for part in path:
        if isinstance(part, SequenceIndex):
            words += repr(part)
        else:
            text = ANY if isinstance(part, int) else str(part)
            words += f".{text}" if words else text
    return words


def holder_of(state: Any, path: Path) -> Any:
    """Return the object that holds the value at the end of a path, or `None`."""
    for part in path[:-1]:
        state = _step(state, part)
        if state is None:
            return None
    return state


def put(holder: Any, part: Any, value: Any) -> None:
    """Write a value at the last part of a path. Tuples and sets stay unchanged."""
    if isinstance(holder, dict):
        dict.__setitem__(holder, part, value)
    elif isinstance(holder, list | deque):
        holder[part] = value
    elif not isinstance(holder, tuple | set | frozenset):
        setattr(holder, part, value)


def _step(state: Any, part: Any) -> Any:
    if isinstance(state, dict):
        return state.get(part)
    if isinstance(state, list | tuple | deque):
        return state[part] if part < len(state) else None
    return getattr(state, str(part), None)


def _walk(
    value: Any, path: Path, seen: set[int], *, top: bool = False
) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if isinstance(value, nn.Module):
        if not top:
            return
    elif isinstance(value, _LEAVES) or callable(value):
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    for name, one in _parts(value):
        yield from _walk(one, (*path, name), seen)


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from list(value.items())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((SequenceIndex(number), one) for number, one in enumerate(list(value)))
    else:
        hidden = ("_parameters", "_buffers", "_modules") if isinstance(value, nn.Module) else ()
        attributes = list(getattr(value, "__dict__", {}).items())
        yield from ((name, one) for name, one in attributes if name not in hidden)


def leaves_of(value: Any) -> Iterator[Any]:
    """Iterate over the values in nested lists, tuples and dicts, or over the value itself."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves_of(item)
    else:
        yield value


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Iterate over the strided tensors in a value: itself, or in nested lists, tuples and dicts."""
    for leaf in leaves_of(value):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            yield leaf


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return the value with `change` applied to each leaf. Containers are copied."""
    if isinstance(value, dict):
        return {name: map_leaves(item, change) for name, item in value.items()}
    if isinstance(value, list | tuple):
        items = (map_leaves(item, change) for item in value)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return change(value)


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return the value with `change` applied to each strided tensor. Containers are copied."""

    def changed(leaf: Any) -> Any:
        strided = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        return change(leaf) if strided else leaf

    return map_leaves(value, changed)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor as one-dimensional `uint8` data, without a copy."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    with torch.no_grad():
        return flat.set_(storage, 0, (storage.nbytes(),), (1,))


def storage_id(tensor: torch.Tensor) -> int:
    """Return an id of the tensor's storage, unique while the storage is alive."""
    return int(tensor.untyped_storage()._cdata)


def held_bytes(values: Iterable[Any]) -> int:
    """Return the bytes of the storages of all tensors in the values, each counted once."""
    tensors = (tensor for value in values for tensor in tensors_of(value))
    return sum({storage_id(t): t.untyped_storage().nbytes() for t in tensors}.values())


class Copies:
    """Copies of views, which free the rest of their storages. Equal views share a copy."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._views: dict[Any, torch.Tensor] = {}
        self._copies: dict[Any, torch.Tensor] = {}
        for value in values:
            for tensor in tensors_of(value):
                self._views.setdefault(_view(tensor), tensor)

    def gain(self) -> int:
        """Return the bytes that copying all views would free; 0 or less if none."""
        shown = sum(tensor.nbytes for tensor in self._views.values())
        return held_bytes(self._views.values()) - shown

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy of a view, or the tensor itself if it shows its whole storage."""
        if tensor.nbytes >= tensor.untyped_storage().nbytes():
            return tensor
        view = _view(tensor)
        if view not in self._copies:
            self._copies[view] = tensor.detach().clone()
        return self._copies[view]


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    layout = tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
    return storage_id(tensor), *layout


@dataclass(slots=True)
class Holding:
    """A storage and the entries that hold it.

    `keys` maps each entry to the bytes it shows, and `shown` is their sum. `looked` is the number of
    entries when the storage was last examined and copying would have freed nothing.
    """

    nbytes: int
    keys: dict[Key, int] = field(default_factory=dict)
    shown: int = 0
    looked: int | None = None

    def worth_a_look(self) -> bool:
        """True if the entries may show less than the storage, and it was not examined recently."""
        count = len(self.keys)
        partial = self.shown < self.nbytes or self.looked is None or count <= self.looked // 2
        return count > 0 and partial


class Accounts:
    """Tracks which entries hold which storages."""

    def __init__(self) -> None:
        self.holdings: dict[int, Holding] = {}
        self.bytes = 0

    def add(self, key: Key, value: Any) -> tuple[int, ...]:
        """Add an entry. Returns the ids of its storages."""
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
        """Remove an entry. Returns the bytes freed, and the storages that other entries still hold."""
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


def state_bytes(state: Any) -> int:
    """Return the bytes of the storages that an object keeps alive, each counted once.

    Visits dicts, lists, tuples and attributes of objects; skips parameters, buffers and submodules.
    """
    return held_bytes(tensor for _, tensor in tensors_in(state))
