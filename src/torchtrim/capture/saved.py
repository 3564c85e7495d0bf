"""Reads autograd's saved tensors from its graph when backward begins.

Saved-tensor hooks would be simpler, but they change the program: every tensor unpacked in backward would be a
new object, created by another operator and without the saved one's attributes; `torch.func` refuses to run;
and in-place writes are no longer detected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.autograd.function import BackwardCFunction

from torchtrim.dispatch.storages import PLAIN, Storages, parts_of
from torchtrim.records.profile import Operator, SavedTensor

_RAW = "_raw_saved_"
_OPAQUE = ("CopySlices", "CppNode")
_NO_NUMBER = 2**64 - 1
Use = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


class RawSaved(NamedTuple):
    """A tensor saved by an autograd node. `node` is its sequence number."""

    node: int
    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Asked(NamedTuple):
    """Backward through a node: its first operator, and how often it ran, last in backward number `run`."""

    first: int
    run: int
    times: int


class SavedTensors:
    """The saved tensors of autograd nodes, and when backward unpacked them.

    `opaque` nodes hide their saved tensors; these are inferred from what they read in backward.
    `functions` are nodes of the script's own `torch.autograd.Function`s, which save when forward returns.
    """

    def __init__(self, storages: Storages) -> None:
        self.found: list[RawSaved] = []
        self.asked: dict[int, Asked] = {}
        self.opaque: set[int] = set()
        self.functions: set[int] = set()
        self._runs = [0]
        self._starts = [0]
        self._storages = storages
        self._read: set[int] = set()
        self._names: dict[type, tuple[str, ...] | None] = {}

    def run_starts(self, tensors: Iterable[Any], operators: int) -> None:
        """Begin a backward from these tensors, after `operators` operators."""
        self.read(tensors)
        self._runs.append(len(self._starts))
        self._starts.append(operators)

    def run_ends(self) -> None:
        """End a backward."""
        self._runs.pop()

    def ran(self, node: int, index: int, uses: Iterable[Use]) -> None:
        """Record an operator that backward ran for a node."""
        run, asked = self._runs[-1], self.asked.get(node)
        if asked is None:
            self.asked[node] = Asked(index, run, 1)
        elif asked.run != run:
            self.asked[node] = Asked(asked.first, run, asked.times + 1)
        if node in self.opaque:
            self._infer(node, self._starts[run], uses)

    def _infer(self, node: int, start: int, uses: Iterable[Use]) -> None:
        known = {saved.storage for saved in self.found if saved.node == node}
        for storage, dtype, shape, strides in uses:
            if storage not in known and self._storages.lives[storage].birth < start:
                self.found.append(RawSaved(node, storage, dtype, shape, strides, 0))

    def read(self, tensors: Iterable[Any]) -> None:
        """Read the new part of the graph behind these tensors or gradient edges."""
        with DisableTorchFunctionSubclass():
            pending = [node for tensor in tensors if (node := _node_of(tensor)) is not None]
            while pending:
                node = pending.pop()
                number = node._sequence_nr()
                if number in self._read or number == _NO_NUMBER:
                    continue
                self._read.add(number)
                self._take(node, number)
                pending += [before for before, _ in node.next_functions if before is not None]

    def _take(self, node: Any, number: int) -> None:
        kind = type(node)
        if kind not in self._names:
            self._names[kind] = _names_of(kind)
        names = self._names[kind]
        if names is None:
            self.opaque.add(number)
            return
        if issubclass(kind, BackwardCFunction):
            self.functions.add(number)
        for name in names:
            try:
                raw = getattr(node, name)
            except RuntimeError:  # a Function's that backward has been through
                return
            for one in raw if isinstance(raw, (list, tuple)) else (raw,):
                tensor = one.data if one is not None and one.unpack_hook is None else None
                if tensor is not None:
                    self._note(number, tensor)

    def _note(self, node: int, tensor: torch.Tensor) -> None:
        plain = type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested
        for part in (tensor,) if plain else parts_of(tensor):
            storage = self._storages.number(part)
            if storage >= 0:
                geometry = (part.shape, part.stride(), int(part.storage_offset()))
                self.found.append(RawSaved(node, storage, part.dtype, *geometry))


def _node_of(tensor: Any) -> Any:
    return tensor.grad_fn if isinstance(tensor, torch.Tensor) else getattr(tensor, "node", None)


def _names_of(kind: type) -> tuple[str, ...] | None:
    """Return a node class's attributes with saved tensors, or None for an opaque class."""
    if any(name in kind.__name__ for name in _OPAQUE):
        return None
    return tuple(name for name in dir(kind) if name.startswith(_RAW))


def saved_tensors(
    saved: SavedTensors,
    makers: dict[int, int],
    operators: Sequence[Operator],
    births: Sequence[int],
) -> list[SavedTensor]:
    """Return the records in the order of saving. `makers`: the operator of each node."""
    packed = [_packed(one, makers.get(one.node, -1), operators, births) for one in saved.found]
    latest: dict[int, int] = {}
    for one, at in zip(saved.found, packed, strict=True):
        latest[one.node] = max(latest.get(one.node, -1), at)
    records = []
    for one, at in zip(saved.found, packed, strict=True):
        asked = saved.asked.get(one.node)
        records.append(
            SavedTensor(
                storage=one.storage,
                dtype=type_name(one.dtype),
                shape=tuple(one.shape),
                strides=tuple(one.strides),
                offset=one.offset,
                packed=latest[one.node] if one.node in saved.functions else at,
                unpacked=asked.first if asked is not None else -1,
                asked=asked.times if asked is not None else 0,
                saver=makers.get(one.node, -1),
            )
        )
    return sorted(records, key=lambda record: (record.packed, record.saver))


def _packed(
    saved: RawSaved, saver: int, operators: Sequence[Operator], births: Sequence[int]
) -> int:
    """Return the operator after which a tensor was saved: the saver if it creates or writes it."""
    if saver < 0:
        return -1
    birth = births[saved.storage]
    if birth >= saver:
        return birth
    return saver if saved.storage in operators[saver].mutates else saver - 1


_TYPES: dict[torch.dtype, str] = {}


def type_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in records, such as `float32`."""
    name = _TYPES.get(dtype)
    if name is None:
        name = _TYPES[dtype] = str(dtype).removeprefix("torch.")
    return name
