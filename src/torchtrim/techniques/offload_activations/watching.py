"""Watches roots run, and moves the planned tensors when autograd saves and reads them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchtrim.dispatch.modes import call_operator, tensors_among
from torchtrim.executor.ordinals import storage_number, unnumbered
from torchtrim.executor.places import module_at
from torchtrim.executor.registry import Handle, all_or_none
from torchtrim.executor.roles import OperatorOrdinal
from torchtrim.executor.saved_tensors import (
    PLAIN,
    OperatorKind,
    Saved,
    SavedTensorWatcher,
    VersionedTensor,
    emptied,
)
from torchtrim.techniques.offload_activations.moving import MovedStorage, StorageMover, View
from torchtrim.techniques.offload_activations.places import OffloadPlace, Room, placed

Rooms = dict[OffloadPlace, Room]


def watch(roots: Mapping[str, nn.Module], where: Sequence[str], mover: StorageMover) -> Handle:
    """Watch the roots of these places. If it raises `ApplyFailed`, the modules are unchanged."""
    places: defaultdict[str, Rooms] = defaultdict(dict)
    for place, room in map(placed, where):
        places[place.root][place] = room
    rooms = {str(next(iter(several))): several for several in places.values()}

    def change(first: str) -> Handle:
        root = module_at(roots, next(iter(rooms[first])).root)
        return OffloadWatcher(rooms[first], mover).watch(root, first, _RootCall)

    return all_or_none(rooms, change)


class _PlannedStorage(NamedTuple):
    """A storage named by a plan. The weak reference keeps its address from being reused."""

    place: OffloadPlace
    storage: StorageWeakRef


class _RootCall:
    """A root's call: how often each operator has run in it, its records, and the moved storages."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.last: OperatorOrdinal | None = None
        self.noted: dict[int, _PlannedStorage] = {}
        self.moved: dict[tuple[int, int], MovedStorage] = {}
        self.leaving: defaultdict[OperatorOrdinal, list[MovedStorage]] = defaultdict(list)
        self.coming: defaultdict[OperatorOrdinal, PendingFetches] = defaultdict(PendingFetches)

    def runs(self, name: str) -> OperatorOrdinal:
        """Count an operator, and free the storages that leave when it starts."""
        run = OperatorOrdinal(name, self.counts[name])
        self.counts[name] += 1
        for moved in self.leaving.pop(run, ()):
            moved.release()
        return run


class PendingFetches:
    """Tensors to fetch when backward first reads what one operator saved, once per backward pass."""

    def __init__(self) -> None:
        self._moved: WeakValueDictionary[tuple[int, int], MovedStorage] = WeakValueDictionary()
        self._passed: set[int] = set()

    def add(self, rank: int, moved: MovedStorage) -> None:
        """Add a storage to fetch. Lower ranks go first."""
        self._moved[rank, id(moved)] = moved

    def begin(self, asker: int) -> None:
        """Start the fetches, unless another reader has done so in this pass."""
        if self._passed and asker not in self._passed:
            self._passed.add(asker)
            return
        self._passed = {asker}
        for _, moved in sorted(self._moved.items(), key=lambda one: one[0]):
            moved.fetch()


class SavedHere(NamedTuple):
    """Autograd's substitute for a tensor that stays. Reading it starts other fetches."""

    kept: VersionedTensor
    coming: PendingFetches

    def get(self) -> torch.Tensor:
        """Return the tensor. Raises `RuntimeError`, as autograd does, if it was written to since."""
        self.coming.begin(id(self))
        return self.kept.get()


class SavedOffload(NamedTuple):
    """Autograd's substitute for a moved tensor. Reading it starts other fetches."""

    moved: MovedStorage
    view: View
    version: VersionedTensor
    coming: PendingFetches | None

    def get(self) -> torch.Tensor:
        """Return the tensor. Raises `RuntimeError`, as autograd does, if it was written to since."""
        if self.coming is not None:
            self.coming.begin(id(self))
        self.version.check(self.view.size)
        return self.moved.get(self.view, id(self))


class OffloadWatcher(SavedTensorWatcher[_RootCall]):
    """Watcher of one root of a plan."""

    def __init__(self, rooms: Rooms, mover: StorageMover) -> None:
        super().__init__("offload_activations", None, VersionedTensor.detached, nests=False)
        self._mover = mover
        self._made: defaultdict[OperatorOrdinal, list[OffloadPlace]] = defaultdict(list)
        for place in rooms:
            self._made[place.made].append(place)
        self._triggers = {place.trigger for place in rooms}
        self._ranks = {place: rank for rank, place in enumerate(rooms)}
        self._rooms = rooms

    def skip(self, counts: Counter[str]) -> None:
        """Advance the ordinals for operators that were substituted."""
        for name in counts.elements():
            self.calls[-1].runs(name)

    def planned(self, call: _RootCall) -> Mapping[str, Collection[OperatorOrdinal]]:
        """Return the operators that a call must run, by their places in the plan."""
        return {str(place): (place.made,) for place in self._rooms}

    def end(self, call: _RootCall) -> None:
        """Free the storages that leave at the end of a call."""
        for several in call.leaving.values():
            for moved in several:
                moved.release()
        call.moved.clear()
        call.noted.clear()

    def operator(self, kind: OperatorKind, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator, and note the tensors that the plan moves."""
        if torch._C._current_autograd_node() is not None:
            return call_operator(func, args, kwargs)
        call = self.calls[-1]
        run = call.runs(kind.role) if kind.role else None
        if kind.writes:
            self._settle(call, kind.written(args, kwargs))
        result = call_operator(func, args, kwargs)
        if run is not None:
            call.last = run
            for place in self._made.get(run, ()):
                self._note(call, place, result)
        return result

    def _settle(self, call: _RootCall, written: list[Any]) -> None:
        """Wait for copies of storages that are about to be written in place."""
        for tensor in tensors_among(written):
            number = storage_number(tensor)
            for (storage, _), moved in call.moved.items():
                if storage == number:
                    moved.release()

    def _note(self, call: _RootCall, place: OffloadPlace, result: Any) -> None:
        self.warn_if_foreign(str(place))
        results = list(tensors_among([result]))
        if place.result < len(results):
            storage = results[place.result].untyped_storage()
            weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            call.noted[storage._cdata] = _PlannedStorage(place, weak)

    def pack(self, tensor: torch.Tensor) -> Saved | torch.Tensor:
        """Start to move a planned tensor, and note the fetches that start when backward reads it."""
        call = self.calls[-1]
        coming = call.coming[call.last] if call.last in self._triggers else None
        noted = call.noted.get(storage_number(tensor)) if type(tensor) in PLAIN else None
        if noted is None or not self._moves(noted.place, tensor):
            kept = VersionedTensor.detached(tensor)
            return kept if coming is None else SavedHere(kept, coming)
        moved = self._moved(call, noted.place, tensor)
        moved.packs += 1
        view = View(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return SavedOffload(moved, view, VersionedTensor(emptied(tensor)), coming)

    def _moves(self, place: OffloadPlace, tensor: torch.Tensor) -> bool:
        """Return True if moving gains memory: on a CPU only to a file."""
        elsewhere = tensor.is_cuda or (tensor.device.type == "cpu" and self._rooms[place].in_file)
        if not elsewhere:
            self.miss(str(place), f"{tensor.device.type} memory is not offloaded")
        return elsewhere and not tensor.is_conj() and not tensor.is_neg()

    def _moved(self, call: _RootCall, place: OffloadPlace, tensor: torch.Tensor) -> MovedStorage:
        """Start to move the storage's current values to the host."""
        key = storage_number(tensor), tensor._version
        moved = call.moved.get(key)
        if moved is None:
            with torch.no_grad(), unnumbered():
                storage, room = tensor.untyped_storage(), self._rooms[place]
                moved = MovedStorage(self._mover, storage, tensor.device, room)
            call.moved[key] = moved
            call.leaving[place.until].append(moved)
            call.coming[place.trigger].add(self._ranks[place], moved)
        return moved
