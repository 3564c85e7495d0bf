"""Watches roots run, and moves the planned tensors when autograd saves and reads them."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrim.executor.failing import note
from torchtrim.executor.ordinals import counting, is_numbered, unnumbered
from torchtrim.executor.places import module_at
from torchtrim.executor.registry import Handle, Handles
from torchtrim.executor.saved_tensor_hooks import Lost, chains, foreign, on_top
from torchtrim.executor.swap import Swapped
from torchtrim.records.operator_names import role_of
from torchtrim.techniques.offload_activations.moving import MovedStorage, StorageMover, View
from torchtrim.techniques.offload_activations.places import UNSEEN, OffloadPlace, Room, placed
from torchtrim.techniques.replay.places import OperatorOrdinal

_PLAIN = (torch.Tensor, nn.Parameter)


Rooms = dict[OffloadPlace, Room]


def watch(roots: Mapping[str, nn.Module], where: Sequence[str], mover: StorageMover) -> Handle:
    """Watch the roots of these places. If it raises `ApplyFailed`, the modules are unchanged."""
    places: defaultdict[str, Rooms] = defaultdict(dict)
    for place, room in map(placed, where):
        places[place.root][place] = room
    handles = Handles()
    try:
        for root, several in places.items():
            watcher = OffloadWatcher(several, mover)
            handles.add(Swapped(module_at(roots, root), functools.partial(_watched, watcher)))
    except BaseException as error:
        note(error, str(next(iter(several))))
        handles.revert()
        raise
    return handles


def _watched(watcher: OffloadWatcher, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or watcher.is_on:
            return forward(*args, **kwargs)
        if foreign():
            watcher.lost.tell(watcher.where)
        if on_top() is not None:
            return forward(*args, **kwargs)
        return watcher.run(functools.partial(forward, *args, **kwargs))

    return run


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

    def skip(self, counts: Counter[str]) -> None:
        """Advance the ordinals for operators that were substituted."""
        for name in counts.elements():
            self.runs(name)

    def runs(self, name: str) -> OperatorOrdinal:
        """Count an operator, and free what was waiting for it."""
        run = OperatorOrdinal(name, self.counts[name])
        self.counts[name] += 1
        _release(self.leaving.pop(run, ()))
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


class SavedOffload(NamedTuple):
    """Autograd's substitute for a saved tensor: the tensor, or its moved storage. Reading it starts other
    fetches.
    """

    tensor: torch.Tensor | None
    moved: MovedStorage | None
    view: View | None
    coming: PendingFetches | None

    def get(self) -> torch.Tensor:
        """Return the tensor."""
        if self.coming is not None:
            self.coming.begin(id(self))
        if self.moved is not None and self.view is not None:
            return self.moved.get(self.view, id(self))
        assert self.tensor is not None
        return self.tensor


class OffloadWatcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode for one root of a plan, active during its forward."""

    def __init__(self, places: Rooms, mover: StorageMover) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mover = mover
        self._made: defaultdict[OperatorOrdinal, list[OffloadPlace]] = defaultdict(list)
        for place in places:
            self._made[place.made].append(place)
        self._triggers = {place.trigger for place in places}
        self._ranks = {place: rank for rank, place in enumerate(places)}
        self._rooms = places
        self.where = str(next(iter(places)))
        self._call: _RootCall | None = None
        self._known: dict[Any, tuple[str, tuple[int, ...]]] = {}
        self._hooks = self._pack, chains(_unpack)
        self.lost = Lost("offload_activations")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that functions compiled by the script stay compiled."""
        return True

    @property
    def is_on(self) -> bool:
        """True during a watched call."""
        return self._call is not None

    def run(self, forward: Callable[[], Any]) -> Any:
        """Run a call while watching it."""
        call = self._call = _RootCall()
        try:
            with torch.autograd.graph.saved_tensors_hooks(*self._hooks), counting(call.skip), self:
                return forward()
        except Exception as error:
            note(error, self.where)
            raise
        finally:
            self._call = None
            for several in call.leaving.values():
                _release(several)
            call.moved.clear()
            call.noted.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, call = kwargs or {}, self._call
        if types and any(kind not in _PLAIN for kind in types):
            return NotImplemented
        if call is None or torch._C._current_autograd_node() is not None:
            return func(*args, **kwargs)
        name, written = self._known.get(func) or self._know(func)
        run = call.runs(name) if is_numbered() else None
        for position in written:
            self._settle(call, args[position] if position < len(args) else None)
        result = func(*args, **kwargs)
        if run is not None:
            self._made_by(run, result, call)
        return result

    def _made_by(self, run: OperatorOrdinal, result: Any, call: _RootCall) -> None:
        if run.name not in UNSEEN:
            call.last = run
        for place in self._made.get(run, ()) if torch.is_grad_enabled() else ():
            self._note(call, place, result)

    def _know(self, func: Any) -> tuple[str, tuple[int, ...]]:
        namespace, _, name = str(func).partition(".")
        written = tuple(
            position
            for position, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        role = role_of(name.partition(".")[0]) if namespace == "aten" else ""
        known = self._known[func] = (role, written)
        return known

    def _settle(self, call: _RootCall, value: Any) -> None:
        """Wait for copies of storages that are about to be written in place."""
        for tensor in _tensors_among(value):
            number = _number(tensor)
            for (storage, _), moved in call.moved.items():
                if storage == number:
                    moved.release()

    def _note(self, call: _RootCall, place: OffloadPlace, result: Any) -> None:
        if foreign():
            self.lost.tell(str(place))
        results = list(_tensors_among(result))
        if place.result < len(results):
            storage = results[place.result].untyped_storage()
            weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            call.noted[storage._cdata] = _PlannedStorage(place, weak)

    def _pack(self, tensor: torch.Tensor) -> SavedOffload:
        call = self._call
        if call is None:
            return SavedOffload(_apart(tensor), None, None, None)
        coming = call.coming[call.last] if call.last in self._triggers else None
        noted = call.noted.get(_number(tensor)) if type(tensor) in _PLAIN else None
        if noted is None or not self._moves(noted.place, tensor):
            return SavedOffload(_apart(tensor), None, None, coming)
        moved = self._moved(call, noted.place, tensor)
        moved.packs += 1
        view = View(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return SavedOffload(None, moved, view, coming)

    def _moves(self, place: OffloadPlace, tensor: torch.Tensor) -> bool:
        """Return True if moving gains memory: on a CPU only to a file."""
        elsewhere = tensor.is_cuda or (tensor.device.type == "cpu" and self._rooms[place].in_file)
        return elsewhere and not tensor.is_conj() and not tensor.is_neg()

    def _moved(self, call: _RootCall, place: OffloadPlace, tensor: torch.Tensor) -> MovedStorage:
        """Start to move the storage's current values to the host."""
        key = _number(tensor), tensor._version
        moved = call.moved.get(key)
        if moved is None:
            with torch.no_grad(), unnumbered():
                storage, room = tensor.untyped_storage(), self._rooms[place]
                moved = MovedStorage(self._mover, storage, tensor.device, room)
            call.moved[key] = moved
            call.leaving[place.until].append(moved)
            call.coming[place.trigger].add(self._ranks[place], moved)
        return moved


def _unpack(saved: SavedOffload) -> torch.Tensor:
    return saved.get()


def _release(several: Sequence[MovedStorage]) -> None:
    for moved in several:
        moved.release()


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """Detach the tensor from its graph, which would otherwise hold itself."""
    if tensor.grad_fn is None:
        return tensor
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


def _number(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors_among(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors_among(one)
