"""Watches roots run: what a plan names is moved as autograd saves it, and comes back as it is asked for."""

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
from torchtrim.records.roles import role_of
from torchtrim.techniques.offload_activations.moving import Moved, Mover, View
from torchtrim.techniques.offload_activations.places import UNSEEN, Place, Room, placed
from torchtrim.techniques.replay.places import Run

_PLAIN = (torch.Tensor, nn.Parameter)


Rooms = dict[Place, Room]


def watch(roots: Mapping[str, nn.Module], where: Sequence[str], mover: Mover) -> Handle:
    """Watch the roots of these places. Raises `ApplyFailed`, the modules as they were."""
    places: defaultdict[str, Rooms] = defaultdict(dict)
    for place, room in map(placed, where):
        places[place.root][place] = room
    handles = Handles()
    try:
        for root, several in places.items():
            watcher = Watcher(several, mover)
            handles.add(Swapped(module_at(roots, root), functools.partial(_watched, watcher)))
    except BaseException as error:
        note(error, str(next(iter(several))))
        handles.revert()
        raise
    return handles


def _watched(watcher: Watcher, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or watcher.is_on:
            return forward(*args, **kwargs)
        if foreign():
            watcher.lost.tell(watcher.where)
        if on_top() is not None:
            return forward(*args, **kwargs)
        return watcher.run(functools.partial(forward, *args, **kwargs))

    return run


class _Noted(NamedTuple):
    """A storage that a plan names; the weak reference keeps its number from being another's."""

    place: Place
    storage: StorageWeakRef


class _Call:
    """A call of a root: how often each operator has run, its notes, and what has moved."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.last: Run | None = None
        self.noted: dict[int, _Noted] = {}
        self.moved: dict[tuple[int, int], Moved] = {}
        self.leaving: defaultdict[Run, list[Moved]] = defaultdict(list)
        self.coming: defaultdict[Run, Coming] = defaultdict(Coming)

    def skip(self, counts: Counter[str]) -> None:
        """Operators in whose place others ran have their numbers."""
        for name in counts.elements():
            self.runs(name)

    def runs(self, name: str) -> Run:
        """One more operator of a name runs: what waits for it is let go."""
        run = Run(name, self.counts[name])
        self.counts[name] += 1
        _release(self.leaving.pop(run, ()))
        return run


class Coming:
    """The tensors that one operator saved are fetched when backward asks for them: once in a pass."""

    def __init__(self) -> None:
        self._moved: WeakValueDictionary[tuple[int, int], Moved] = WeakValueDictionary()
        self._passed: set[int] = set()

    def add(self, rank: int, moved: Moved) -> None:
        """Also fetch this; those of the lowest ranks come first."""
        self._moved[rank, id(moved)] = moved

    def begin(self, asker: int) -> None:
        """Fetch, unless another has begun the pass that this asker is in."""
        if self._passed and asker not in self._passed:
            self._passed.add(asker)
            return
        self._passed = {asker}
        for _, moved in sorted(self._moved.items(), key=lambda one: one[0]):
            moved.fetch()


class Saved(NamedTuple):
    """What autograd holds in place of a tensor: it, or where it has moved; asking begins other fetches."""

    tensor: torch.Tensor | None
    moved: Moved | None
    view: View | None
    coming: Coming | None

    def get(self) -> torch.Tensor:
        """The tensor."""
        if self.coming is not None:
            self.coming.begin(id(self))
        if self.moved is not None and self.view is not None:
            return self.moved.get(self.view, id(self))
        assert self.tensor is not None
        return self.tensor


class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One for a root of a plan. It is on while that runs forward."""

    def __init__(self, places: Rooms, mover: Mover) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mover = mover
        self._made: defaultdict[Run, list[Place]] = defaultdict(list)
        for place in places:
            self._made[place.made].append(place)
        self._triggers = {place.trigger for place in places}
        self._ranks = {place: rank for rank, place in enumerate(places)}
        self._rooms = places
        self.where = str(next(iter(places)))
        self._call: _Call | None = None
        self._known: dict[Any, tuple[str, tuple[int, ...]]] = {}
        self._hooks = self._pack, chains(_unpack)
        self.lost = Lost("offload_activations")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: what the script compiles runs compiled."""
        return True

    @property
    def is_on(self) -> bool:
        """Whether a call that is watched is going on."""
        return self._call is not None

    def run(self, forward: Callable[[], Any]) -> Any:
        """A call that is watched."""
        call = self._call = _Call()
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

    def _made_by(self, run: Run, result: Any, call: _Call) -> None:
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

    def _settle(self, call: _Call, value: Any) -> None:
        """What is about to be written in place is copied first."""
        for tensor in _tensors_among(value):
            number = _number(tensor)
            for (storage, _), moved in call.moved.items():
                if storage == number:
                    moved.release()

    def _note(self, call: _Call, place: Place, result: Any) -> None:
        if foreign():
            self.lost.tell(str(place))
        results = list(_tensors_among(result))
        if place.result < len(results):
            storage = results[place.result].untyped_storage()
            weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            call.noted[storage._cdata] = _Noted(place, weak)

    def _pack(self, tensor: torch.Tensor) -> Saved:
        call = self._call
        if call is None:
            return Saved(_apart(tensor), None, None, None)
        coming = call.coming[call.last] if call.last in self._triggers else None
        noted = call.noted.get(_number(tensor)) if type(tensor) in _PLAIN else None
        if noted is None or not self._moves(noted.place, tensor):
            return Saved(_apart(tensor), None, None, coming)
        moved = self._moved(call, noted.place, tensor)
        moved.packs += 1
        view = View(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return Saved(None, moved, view, coming)

    def _moves(self, place: Place, tensor: torch.Tensor) -> bool:
        """Whether there is anything to gain: on a CPU only from a file."""
        elsewhere = tensor.is_cuda or (tensor.device.type == "cpu" and self._rooms[place].in_file)
        return elsewhere and not tensor.is_conj() and not tensor.is_neg()

    def _moved(self, call: _Call, place: Place, tensor: torch.Tensor) -> Moved:
        """The storage as it is now, on its way to the host."""
        key = _number(tensor), tensor._version
        moved = call.moved.get(key)
        if moved is None:
            with torch.no_grad(), unnumbered():
                storage, room = tensor.untyped_storage(), self._rooms[place]
                moved = Moved(self._mover, storage, tensor.device, room)
            call.moved[key] = moved
            call.leaving[place.until].append(moved)
            call.coming[place.trigger].add(self._ranks[place], moved)
        return moved


def _unpack(saved: Saved) -> torch.Tensor:
    return saved.get()


def _release(several: Sequence[Moved]) -> None:
    for moved in several:
        moved.release()


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph, which would hold itself."""
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
