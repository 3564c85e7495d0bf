"""Tracks births and deaths of storages by weak references."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass, _current_autograd_node
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchtrim.dispatch.threads import in_new_thread
from torchtrim.records.profile import DEVICE_POOL

_OWN_REFERENCES = 2
"""References to a tensor: the local variable of `is_kept`, and the argument of `sys.getrefcount`."""

_AT_ONCE = 32
"""Objects checked at each operator: about 10 microseconds."""


class PythonReferences:
    """The tensors that Python still refers to; `note` gets a storage's number once Python releases it."""

    def __init__(self, note: Callable[[int], None]) -> None:
        self._note = note
        self._objects: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def add(self, tensor: torch.Tensor, number: int) -> None:
        """Add a tensor that an operator created, and its storage's number."""
        reference = weakref.ref(tensor)
        self._objects[id(reference)] = reference, number

    def sweep(self, clock: int) -> None:
        """Report the tensors that Python has released. With many tensors, do not check at every operator."""
        if not self._objects or clock % (len(self._objects) // _AT_ONCE + 1):
            return
        for key, (reference, number) in list(self._objects.items()):
            if not is_kept(reference):
                self._objects.pop(key, None)
                self._note(number)

    def drop(self, number: int) -> None:
        """Forget a storage's tensors."""
        self._objects = {key: one for key, one in self._objects.items() if one[1] != number}

    def end(self) -> None:
        """Report all others, at the end of the step."""
        for _, number in self._objects.values():
            self._note(number)
        self._objects.clear()


def is_kept(reference: weakref.ref[torch.Tensor]) -> bool:
    """Return True if Python has a reference to the tensor."""
    tensor: Any = reference()
    if tensor is None:
        return False
    is_shared: bool = tensor._use_count() > 1
    return sys.getrefcount(tensor) - _OWN_REFERENCES > is_shared


@functools.cache
def counts_tell() -> bool:
    """Return True if this torch counts references as `is_kept` expects.

    A weak reference is not enough: an object stays alive while autograd keeps its tensor. But torch holds one
    reference itself while C++ keeps the tensor. Runs in a new thread, since the caller's hooks on saved
    tensors, such as a checkpoint's, would count the tensor that autograd keeps here.
    """
    return in_new_thread(_counts_tell)


def _counts_tell() -> bool:
    with torch.inference_mode(False), torch.enable_grad(), torch._C._DisableTorchDispatch():
        tensor = torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=True) * 2
        saver, reference = tensor.sin(), weakref.ref(tensor)
        while_kept = is_kept(reference)
        del tensor
        return while_kept and saver.requires_grad and not is_kept(reference)


counts_tell()  # Tried here, before hooks on saved tensors of the user's can see its tensors.


PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
"""Classes whose attributes are torch's own."""

_SIMPLE = PLAIN | {FakeTensor}
_CUDA_BLOCK = 512
"""The smallest block of CUDA's caching allocator (`kMinBlockSize`)."""

_NO_STORAGE = (NotImplementedError, RuntimeError)
_device_name = functools.cache(str)


class _StorageReference(weakref.ref[Any]):
    __slots__ = ("bytes", "key", "number")
    key: int
    number: int
    bytes: int


@dataclass(slots=True, eq=False)
class StorageLife:
    """A storage of `bytes` bytes, alive during operators `birth <= i < death`.

    `released`: the autograd engine freed it. For `kept` and `pool` see `records.profile.Storage`.
    """

    bytes: int
    birth: int
    device: str
    kind: str
    death: int = -1
    name: str = ""
    pool: str = DEVICE_POOL
    kept: int = -1
    released: bool = False


FILE = "file"
"""The pool of memory-mapped files, which use no memory of the device or the process."""


class Storages:
    """All storages seen: `lives` by number, live ones by the address of their C++ storage.

    `clock` is the number of the next operator. `live_bytes` and `peak_bytes` count the bytes on `device`, by
    default on all devices. `is_pinned` tests a host tensor, `lends` a storage on the host.
    """

    def __init__(
        self,
        device: str = "",
        is_pinned: Callable[[Any], bool] = lambda _: False,
        lends: Callable[[Any], bool] | None = None,
    ) -> None:
        self.lives: list[StorageLife] = []
        self.clock = 0
        self.live_bytes = 0
        self.peak_bytes = 0
        self._counted = device
        self._is_pinned = is_pinned
        self._lends = lends or is_lent
        self._living: dict[int, _StorageReference] = {}
        self._python = PythonReferences(self._released) if counts_tell() else None
        self._on_death = self._died

    def see(self, tensor: torch.Tensor, birth: int, kind: str = "") -> int:
        """Return the number of the tensor's storage, which is born at `birth` if new, or -1."""
        try:
            storage = tensor.untyped_storage()
        except _NO_STORAGE:
            return -1
        key = storage._cdata
        known = self._living.get(key)
        if known is not None:
            return known.number
        number = self._begin(storage, key, birth, kind)
        if not self.counts(life := self.lives[number]):
            host = "pinned" if self._is_pinned(tensor) else "host"
            life.pool = host if life.device == "cpu" else life.device
        return number

    def keep(self, result: Any) -> None:
        """Track how long Python refers to the tensors that an operator returned."""
        if self._python is None:
            return
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if type(tensor) in _SIMPLE and (number := self.number(tensor)) >= 0:
                self._python.add(tensor, number)

    def let_go(self, number: int) -> None:
        """Forget that Python refers to a storage's tensors: only a wrapper that autograd saved does."""
        if self._python is not None:
            self._python.drop(number)
            self.lives[number].kept = -1

    def sweep(self) -> None:
        """Check which tensors Python has released, before the next operator."""
        if self._python is not None:
            self._python.sweep(self.clock)

    def resized(self, storage: Any) -> int:
        """Return the number of a storage, a new one if it was resized, or -1 if it was never seen."""
        known = self._living.get(storage._cdata)
        if known is None or known.number < 0 or known.bytes == storage.nbytes():
            return known.number if known is not None else -1
        self._end(known.number)
        old = self.lives[known.number]
        number = self._begin(storage, known.key, self.clock - 1, old.kind)
        self.lives[number].name, self.lives[number].pool = old.name, old.pool
        return number

    def exclude(self, storage: Any) -> None:
        """Leave a storage uncounted until it dies: it belongs to torchtrim."""
        if storage._cdata not in self._living:
            self._watch(storage, storage._cdata, -1)

    def settle(self, tensor: torch.Tensor) -> int:
        """Return the number of the storage of a tensor that was written and maybe resized, or -1."""
        try:
            return self.resized(tensor.untyped_storage())
        except _NO_STORAGE:
            return -1

    def number(self, tensor: torch.Tensor) -> int:
        """Return the number of a live storage that was seen, or -1."""
        try:
            known = self._living.get(tensor.untyped_storage()._cdata)
        except _NO_STORAGE:
            return -1
        return known.number if known is not None else -1

    def addresses(self) -> dict[int, int]:
        """Return the addresses of the live storages that were seen, by their numbers."""
        found = {}
        for reference in list(self._living.values()):
            with contextlib.suppress(*_NO_STORAGE):
                if reference.number >= 0 and (storage := reference()) is not None:
                    found[reference.number] = int(storage.data_ptr())
        return found

    def counts(self, life: StorageLife) -> bool:
        """Return True if the storage is on the counted device; `"cuda"` matches any CUDA device."""
        return life.device != FILE and life.device.startswith(self._counted)

    def counted_bytes(self, life: StorageLife) -> int:
        """Return the bytes of a storage, 0 if its device is not counted."""
        return life.bytes if self.counts(life) else 0

    def end(self) -> None:
        """End the step: live storages have lived until now."""
        self.note_peak()
        if self._python is not None:
            self._python.end()

    def note_peak(self) -> None:
        """Update the peak with the bytes alive now."""
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes

    def forget(self) -> None:
        """Stop watching: live storages get no death."""
        self._living.clear()

    def _begin(self, storage: Any, key: int, birth: int, kind: str) -> int:
        number = len(self.lives)
        device = FILE if storage.filename else self._device(storage.device)
        watched = self._watch(storage, key, number)
        life = StorageLife(allocated_bytes(watched.bytes, device), birth, device, kind)
        self.lives.append(life)
        if self.counts(life):
            if device == "cpu" and self._lends(storage):
                life.bytes = 0
            self.live_bytes += life.bytes
        return number

    def _watch(self, storage: Any, key: int, number: int) -> _StorageReference:
        watched = _StorageReference(storage, self._on_death)
        watched.key, watched.number, watched.bytes = key, number, storage.nbytes()
        self._living[key] = watched  # last, so that other threads never see it without its number
        return watched

    def _device(self, device: torch.device) -> str:
        return _device_name(device)

    def _released(self, number: int) -> None:
        self.lives[number].kept = self.clock

    def _end(self, number: int) -> None:
        life = self.lives[number]
        life.death = max(self.clock, life.birth)
        life.released = _current_autograd_node() is not None
        if self.counts(life):
            self.live_bytes -= life.bytes

    def _died(self, watched: _StorageReference) -> None:
        if self._living.get(watched.key) is watched:
            del self._living[watched.key]
            if watched.number >= 0:
                self._end(watched.number)


def is_lent(storage: Any) -> bool:
    """Return True for memory of another library, such as a numpy array, which each sample is a view of.

    What a loader's workers share has been allocated for torch.
    """
    return not (storage.resizable() or storage.is_shared())


def allocated_bytes(size: int, device: str) -> int:
    """Return the bytes an allocator reserves for a size: CUDA rounds up to blocks, meta tensors have none."""
    if device.startswith("cuda"):
        return -(-size // _CUDA_BLOCK) * _CUDA_BLOCK
    return 0 if device == "meta" else size


def parts_of(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """Return the plain tensors that hold a tensor's elements: itself, or parts of a sparse one or wrapper.

    A tensor wrapped by a transform, such as `torch.vmap`, is held by the tensor inside.
    """
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    if type(tensor) in PLAIN and tensor.layout is torch.strided:
        return (tensor,)
    if is_lazy(tensor):
        return ()
    with DisableTorchFunctionSubclass(), torch.no_grad():
        wrapper: Any = tensor
        if is_traceable_wrapper_subclass(wrapper):
            names, _ = wrapper.__tensor_flatten__()
            inner = (getattr(wrapper, name) for name in names)
            return [p for one in inner if isinstance(one, torch.Tensor) for p in parts_of(one)]
        if tensor.layout is torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def element_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; of a sparse one, those of its indices and values."""
    return sum(part.nbytes for part in parts_of(tensor))


def storages_in(tensors: Iterable[torch.Tensor]) -> dict[int, Any]:
    """Return the storages of the tensors that have one, by the address of the C++ storage."""
    found = {}
    for tensor in tensors:
        for part in parts_of(tensor):
            with contextlib.suppress(*_NO_STORAGE):
                storage = part.untyped_storage()
                found[storage._cdata] = storage
    return found


def storage_bytes(storages: Iterable[Any], device: str = "") -> int:
    """Return the allocated bytes of the storages on a device; `"cuda"` matches any CUDA device."""
    return sum(
        allocated_bytes(storage.nbytes(), str(storage.device))
        for storage in storages
        if str(storage.device).startswith(device)
    )


def reachable_tensors() -> Iterator[torch.Tensor]:
    """Yield every tensor that Python can reach, found through the garbage collector."""
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and not is_lazy(thing):
            yield thing
            with DisableTorchFunctionSubclass():
                gradient = thing.grad if thing.is_leaf else None
            if gradient is not None:
                yield gradient


def reachable_bytes() -> int:
    """Return the bytes of all storages on the host that Python can reach, without files and lent memory."""
    storages = storages_in(reachable_tensors()).values()
    return storage_bytes((one for one in storages if not (one.filename or is_lent(one))), "cpu")
