"""Reads autograd's saved tensors from its graph when backward begins.

Saved-tensor hooks would be simpler, but they change the program: every tensor unpacked in backward would be a
new object, created by another operator and without the saved one's attributes; `torch.func` refuses to run;
and in-place writes are no longer detected.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.autograd.function import BackwardCFunction

from torchtrim.capture.code.side_effects import SideEffects
from torchtrim.dispatch.modes import tensors_among
from torchtrim.dispatch.storages import PLAIN, Storages, is_kept, parts_of
from torchtrim.records.profile import Operator, SavedTensor

_RAW = "_raw_saved_"
_OPAQUE = ("CopySlices", "CppNode")
_NO_NUMBER = 2**64 - 1  # UINT64_MAX, the sequence number of `AccumulateGrad` nodes
RawUse = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]
"""A tensor that an operator uses: the number of its storage, dtype, shape and strides."""


class RawSaved(NamedTuple):
    """A tensor saved by an autograd node. `node` is its sequence number."""

    node: int
    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    hooked: bool = False


class _NodeRuns(NamedTuple):
    """Backward through a node: its first operator, and how often it ran, last in backward number `run`."""

    first: int
    run: int
    times: int


class SavedTensors:
    """The saved tensors of autograd nodes, and when backward unpacked them.

    `opaque` nodes hide their saved tensors, which are inferred from the tensors they read in backward.
    `functions` are nodes of the script's own `torch.autograd.Function`s, which save when forward returns.
    """

    def __init__(self, storages: Storages) -> None:
        self.found: list[RawSaved] = []
        self.runs: dict[int, _NodeRuns] = {}
        self.opaque: set[int] = set()
        self.functions: set[int] = set()
        self._running = [0]
        self._starts = [0]
        self._storages = storages
        self._read: set[int] = set()
        self._names: dict[type, tuple[str, ...] | None] = {}
        self._wrappers: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._pure: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def run_starts(self, tensors: Iterable[Any], operators: int) -> None:
        """Begin a backward from these tensors, after `operators` operators."""
        self.read(tensors)
        self._let_go()
        self._running.append(len(self._starts))
        self._starts.append(operators)

    def run_ends(self) -> None:
        """End a backward."""
        self._running.pop()

    def ran(self, node: int, index: int, uses: Iterable[RawUse]) -> None:
        """Record an operator that backward ran for a node."""
        run, before = self._running[-1], self.runs.get(node)
        if before is None:
            self.runs[node] = _NodeRuns(index, run, 1)
        elif before.run != run:
            self.runs[node] = _NodeRuns(before.first, run, before.times + 1)
        if node in self.opaque:
            known = {saved.storage for saved in self.found if saved.node == node}
            for use in uses:
                is_old = self._storages.lives[use[0]].birth < self._starts[run]
                if is_old and use[0] not in known:
                    self.found.append(RawSaved(node, *use, 0))

    def read(self, tensors: Iterable[Any]) -> None:
        """Read the new part of the graph behind these tensors or gradient edges."""
        with DisableTorchFunctionSubclass():
            pending: list[Any] = [
                one.grad_fn if isinstance(one, torch.Tensor) else getattr(one, "node", None)
                for one in tensors
            ]
            while pending:
                node = pending.pop()
                number = _NO_NUMBER if node is None else node._sequence_nr()
                if number in self._read or number == _NO_NUMBER:
                    continue
                self._read.add(number)
                self._take(node, number)
                pending += [before for before, _ in node.next_functions]

    def _take(self, node: Any, number: int) -> None:
        kind = type(node)
        if kind not in self._names:
            opaque = any(name in kind.__name__ for name in _OPAQUE)
            self._names[kind] = (
                None if opaque else tuple(n for n in dir(kind) if n.startswith(_RAW))
            )
        names = self._names[kind]
        if names is None:
            self.opaque.add(number)
            return
        if issubclass(kind, BackwardCFunction):
            self.functions.add(number)
        for name in names:
            try:
                raw = getattr(node, name)
            except RuntimeError:  # backward has freed the Function's saved tensors
                return
            for one in raw if isinstance(raw, (list, tuple)) else (raw,):
                hook = None if one is None else one.unpack_hook
                if one is not None and (hook is None or self._only_moves(hook)):
                    for tensor in tensors_among((one.data,)):
                        self._note(number, tensor, hooked=hook is not None)

    def _only_moves(self, unpack: Any) -> bool:
        """Return True for hooks that the script has set around forward and backward, and that write nothing.

        Where a technique saves fewer tensors, they are called less often.
        """
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None or hooks[1] is not unpack:
            return False
        functions = [one for one in hooks if isinstance(one, types.FunctionType)]
        if len(functions) < len(hooks):
            return False
        if unpack not in self._pure:  # weak: those of a checkpoint hold what it recomputes
            self._pure[unpack] = not SideEffects((), functions).writes
        return self._pure[unpack]

    def _note(self, node: int, tensor: torch.Tensor, *, hooked: bool) -> None:
        plain = type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested
        for part in (tensor,) if plain else parts_of(tensor):
            storage = self._storages.number(part)
            if storage >= 0:
                if not plain and part is not tensor:
                    self._wrappers.append((weakref.ref(tensor), storage))
                geometry = (part.shape, part.stride(), int(part.storage_offset()))
                self.found.append(RawSaved(node, storage, part.dtype, *geometry, hooked))

    def _let_go(self) -> None:
        """Let go what Python refers to by the attributes of a wrapper alone, which autograd alone keeps."""
        for wrapper, storage in self._wrappers:
            if wrapper() is not None and not is_kept(wrapper):
                self._storages.let_go(storage)
        self._wrappers.clear()


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
    never = _NodeRuns(-1, 0, 0)
    records = [
        SavedTensor(
            storage=one.storage,
            dtype=type_name(one.dtype),
            shape=tuple(one.shape),
            strides=tuple(one.strides),
            offset=one.offset,
            packed=latest[one.node] if one.node in saved.functions else at,
            unpacked=saved.runs.get(one.node, never).first,
            asked=saved.runs.get(one.node, never).times,
            saver=makers.get(one.node, -1),
            hooked=one.hooked,
        )
        for one, at in zip(saved.found, packed, strict=True)
    ]
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


@functools.cache
def type_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in records, such as `float32`."""
    return str(dtype).removeprefix("torch.")
