"""Run forwards, or store their saved tensors, in half precision; and hand-written versions of both."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

from torchtrim.errors import ApplyFailed
from torchtrim.executor.registry import Handle
from torchtrim.executor.swap import Swapped, does_not_train, is_exported_or_scripted

Forward = Callable[..., Any]


def lowered(module: nn.Module, kind: type[AutocastForward | NarrowSaved], dtype: str) -> Handle:
    """Run the module's forward, and that of its copies, in half precision when gradients are enabled.

    Transforms of `torch.func` take no hooks on saved tensors, so under them `NarrowSaved` is off.
    """
    lowering = kind(module, dtype)
    return Swapped(
        module,
        lambda forward: functools.partial(_if_graded, lowering, forward),
        is_exported_or_scripted if kind is AutocastForward else does_not_train,
        copied=lambda one: functools.partial(_of_copy, kind(one, dtype), one),
    )


def _if_graded(lowering: Forward, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    return (
        lowering(forward, *args, **kwargs) if torch.is_grad_enabled() else forward(*args, **kwargs)
    )


def _of_copy(lowering: Forward, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = functools.partial(type(module).forward, module)
    return _if_graded(lowering, forward, *args, **kwargs)


class AutocastForward:
    """Runs a forward under autocast and casts its results back to float32.

    Raises `ApplyFailed` for a module without parameters or buffers, whose device is unknown.
    """

    def __init__(self, module: nn.Module, dtype: str) -> None:
        self._device = _device_of(module)
        self._dtype: torch.dtype = getattr(torch, dtype)

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run `forward` under autocast."""
        with torch.autocast(self._device, dtype=self._dtype):
            result = forward(*args, **kwargs)
        return tree_map(self._widened, result)

    def _widened(self, leaf: Any) -> Any:
        is_half = isinstance(leaf, torch.Tensor) and leaf.dtype is self._dtype
        return leaf.float() if is_half else leaf


class NarrowSaved:
    """Runs a forward and stores its saved float32 activations in half precision.

    A storage is stored once for all its saved views, and upcast once for views in use at the same time.
    float64 is left alone, which lets the verifier tell rounding from a bug.
    """

    def __init__(self, module: nn.Module, dtype: str) -> None:
        self._module = module
        self._dtype: torch.dtype = getattr(torch, dtype)

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run `forward` with hooks on saved tensors."""
        call = _SavedTensors(self._dtype, _storages_of(self._module, args, kwargs))
        with torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack):
            return forward(*args, **kwargs)


@dataclass(eq=False)
class _HalfStorage:
    """A storage in half precision. `wide` is its upcast copy while in use."""

    narrow: torch.Tensor
    of: StorageWeakRef
    version: int
    wide: StorageWeakRef | None = None

    def widened(self) -> torch.UntypedStorage:
        wide = None
        if self.wide is not None and not _is_gone(self.wide):
            wide = torch.UntypedStorage._new_with_weak_ptr(self.wide.cdata)
        if wide is None:
            wide = self.narrow.float().untyped_storage()
            self.wide = _weak(wide)
        return wide


def _weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    """Return a weak reference to a storage, which also keeps its address from being reused."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


class _HalfView:
    def __init__(self, kept: _HalfStorage, like: torch.Tensor) -> None:
        self.kept = kept
        self.view = like.storage_offset(), like.shape, like.stride()
        self.device = like.device

    def tensor(self) -> torch.Tensor:
        empty = torch.empty(0, dtype=torch.float32, device=self.device)
        return empty.set_(self.kept.widened(), *self.view)


class _SavedTensors:
    """Saved tensors of one call of a forward. `exempt`: storages that stay in memory anyway."""

    def __init__(self, dtype: torch.dtype, exempt: Exempt) -> None:
        self._dtype = dtype
        self._exempt = exempt
        self._known: dict[int, _HalfStorage] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _HalfView:
        if not _may_narrow(tensor, self._exempt):
            return tensor
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None or _is_gone(known.of) or known.version != tensor._version:
            count = storage.nbytes() // tensor.element_size()
            narrow = tensor.detach().as_strided((count,), (1,), 0).to(self._dtype)
            known = _HalfStorage(narrow, _weak(storage), tensor._version)
            self._known[storage._cdata] = known
        return _HalfView(known, tensor)

    def unpack(self, kept: torch.Tensor | _HalfView) -> torch.Tensor:
        return kept.tensor() if isinstance(kept, _HalfView) else kept


class ForwardByHand:
    """Sets `forward` on a module instance and its copies. `revert` undoes it."""

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        self._module = module
        self._own = module.__dict__.get("forward")
        module.__dict__["forward"] = functools.partial(forward, module)

    def revert(self) -> None:
        """Restore the module's forward."""
        del self._module.__dict__["forward"]
        if self._own is not None:
            self._module.__dict__["forward"] = self._own


def _unbound(module: nn.Module) -> Forward:
    """Return the module's forward, which takes a module first: its copies too."""
    own = module.__dict__.get("forward")
    if own is None:
        return type(module).forward
    return functools.wraps(own)(lambda _, *args, **kwargs: own(*args, **kwargs))


def autocast_by_hand(module: nn.Module, dtype: str) -> Handle:
    """Run `model.forward` under `torch.autocast` and cast results to float32, like Accelerate."""
    forward, device, half = _unbound(module), _device_of(module), getattr(torch, dtype)

    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or is_exported_or_scripted():
            return forward(self, *args, **kwargs)
        with torch.autocast(device, dtype=half):
            result = forward(self, *args, **kwargs)
        return tree_map(lambda x: x.float() if getattr(x, "dtype", None) is half else x, result)

    return ForwardByHand(module, run)


def narrow_by_hand(module: nn.Module, dtype: str) -> Handle:
    """Store each tensor saved by `model.forward` separately in half precision, ignoring shared storages."""
    forward, half = _unbound(module), getattr(torch, dtype)

    def narrow(exempt: Exempt, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(half) if _may_narrow(tensor, exempt) else tensor

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype is half else tensor

    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        pack = functools.partial(narrow, _storages_of(self, args, kwargs))
        with torch.autograd.graph.saved_tensors_hooks(pack, widen):
            return forward(self, *args, **kwargs)

    return ForwardByHand(module, run)


Exempt = Mapping[int, StorageWeakRef]
"""Storages by their numbers, which the references keep from being reused by others."""


def _may_narrow(tensor: torch.Tensor, exempt: Exempt) -> bool:
    """Return True for a plain strided float32 tensor whose storage is not exempt."""
    return (
        (tensor.dtype, type(tensor), tensor.layout) == (torch.float32, torch.Tensor, torch.strided)
        and tensor.numel() > 1
        and tensor.untyped_storage()._cdata not in exempt
    )


def _storages_of(module: nn.Module, *given: Any) -> Exempt:
    tensors = [*module.parameters(), *module.buffers(), *tree_leaves(given)]
    storages = [
        t.untyped_storage()
        for t in tensors
        if isinstance(t, torch.Tensor) and t.layout is torch.strided
    ]
    return {one._cdata: _weak(one) for one in storages}


def _device_of(module: nn.Module) -> str:
    for tensor in (*module.parameters(), *module.buffers()):
        return str(tensor.device.type)
    raise ApplyFailed(
        f"{type(module).__name__} has no parameters or buffers, so its device is unknown and its precision "
        "cannot be lowered. Name a module with parameters."
    )
