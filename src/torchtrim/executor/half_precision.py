"""Forwards that run in half precision, or keep what they save in it; and both as a person writes them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

from torchtrim.errors import ApplyFailed
from torchtrim.executor.handles import Handle
from torchtrim.executor.swap import Swapped

Forward = Callable[..., Any]


class Lowering(Protocol):
    """Runs a forward in another precision."""

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """What the forward gives."""
        ...


def lowered(module: nn.Module, lowering: Lowering) -> Handle:
    """Give a module that forward, where there are gradients."""
    return Swapped(module, functools.partial(_graded, lowering))


def _graded(lowering: Lowering, forward: Forward) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return lowering(forward, *args, **kwargs)

    return run


class Autocast:
    """Runs a forward under autocast, its results cast back to float32. Raises `ApplyFailed` for a module
    without parameters, of which no device is known."""

    def __init__(self, module: nn.Module, dtype: str) -> None:
        self._device = _device_of(module)
        self._dtype: torch.dtype = getattr(torch, dtype)

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """As `forward`."""
        with torch.autocast(self._device, dtype=self._dtype):
            made = forward(*args, **kwargs)
        return tree_map(self._widened, made)

    def _widened(self, leaf: Any) -> Any:
        return (
            leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype == self._dtype else leaf
        )


class NarrowSaved:
    """Runs a forward so that what autograd saves of float32 activations is kept in half precision.

    A storage is kept once, however many views of it are saved, and widened once for those in use together.
    Only float32 is narrowed: in float64 nothing is, which is how the verifier tells rounding from a bug.
    """

    def __init__(self, module: nn.Module, dtype: str) -> None:
        self._module = module
        self._dtype: torch.dtype = getattr(torch, dtype)

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """As `forward`."""
        call = _Call(self._dtype, _storages_of(self._module, args, kwargs))
        with torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack):
            return forward(*args, **kwargs)


class _Kept:
    """A storage in half precision; `wide` is what it was widened to, while that is in use."""

    def __init__(self, narrow: torch.Tensor, of: StorageWeakRef, version: int) -> None:
        self.narrow = narrow
        self.of = of
        self.version = version
        self.wide: StorageWeakRef | None = None

    def widened(self) -> torch.UntypedStorage:
        """The storage in float32."""
        there = None
        if self.wide is not None and not _is_gone(self.wide):
            there = torch.UntypedStorage._new_with_weak_ptr(self.wide.cdata)
        if there is None:
            there = self.narrow.float().untyped_storage()
            self.wide = _weak(there)
        return there


def _weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    """A reference that does not keep a storage, while its address is not given to another."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


class _Saved:
    """A view of a kept storage."""

    def __init__(self, kept: _Kept, like: torch.Tensor) -> None:
        self.kept = kept
        self.view = like.storage_offset(), like.shape, like.stride()
        self.device = like.device

    def tensor(self) -> torch.Tensor:
        """The view, in float32."""
        empty = torch.empty(0, dtype=torch.float32, device=self.device)
        return empty.set_(self.kept.widened(), *self.view)


class _Call:
    """What one call of a forward saves. `exempt`: storages that are there anyway."""

    def __init__(self, dtype: torch.dtype, exempt: set[int]) -> None:
        self._dtype = dtype
        self._exempt = exempt
        self._known: dict[int, _Kept] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        """What is kept of a tensor that autograd saves."""
        if not _may_narrow(tensor, self._exempt):
            return tensor
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None or _is_gone(known.of) or known.version != tensor._version:
            known = _Kept(self._narrowed(storage, tensor), _weak(storage), tensor._version)
            self._known[storage._cdata] = known
        return _Saved(known, tensor)

    def _narrowed(self, storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
        """All of a storage in half precision."""
        count = storage.nbytes() // like.element_size()
        return like.detach().as_strided((count,), (1,), 0).to(self._dtype)

    def unpack(self, kept: torch.Tensor | _Saved) -> torch.Tensor:
        """The tensor that autograd asks for."""
        return kept.tensor() if isinstance(kept, _Saved) else kept


class ByHand:
    """A module whose `forward` was set on the instance. `revert` takes that back."""

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        self._module = module
        self._own = module.__dict__.get("forward")
        module.__dict__["forward"] = forward

    def revert(self) -> None:
        """Make the module what it was."""
        del self._module.__dict__["forward"]
        if self._own is not None:
            self._module.__dict__["forward"] = self._own


def autocast_by_hand(module: nn.Module, dtype: str) -> Handle:
    """`model.forward` under `torch.autocast`, and what it returns in float32, as Accelerate writes it."""
    forward, device, half = module.forward, _device_of(module), getattr(torch, dtype)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        enabled = torch.is_grad_enabled()
        with torch.autocast(device, dtype=half, enabled=enabled) if enabled else _nothing():
            made = forward(*args, **kwargs)
        if not enabled:
            return made
        return tree_map(lambda x: x.float() if getattr(x, "dtype", None) is half else x, made)

    return ByHand(module, run)


def narrow_by_hand(module: nn.Module, dtype: str) -> Handle:
    """Hooks around `model.forward` that keep each tensor by itself, and know of no storages they share."""
    forward, half = module.forward, getattr(torch, dtype)

    def narrow(exempt: set[int], tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(half) if _may_narrow(tensor, exempt) else tensor

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype is half else tensor

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        pack = functools.partial(narrow, _storages_of(module, args, kwargs))
        with torch.autograd.graph.saved_tensors_hooks(pack, widen):
            return forward(*args, **kwargs)

    return ByHand(module, run)


def _nothing() -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


def _may_narrow(tensor: torch.Tensor, exempt: set[int]) -> bool:
    """Whether it is an ordinary float32 tensor of whole memory that nothing else keeps."""
    if tensor.dtype is not torch.float32 or type(tensor) is not torch.Tensor:
        return False
    if tensor.layout is not torch.strided or tensor.numel() < 2:
        return False
    return tensor.untyped_storage()._cdata not in exempt


def _storages_of(module: nn.Module, *given: Any) -> set[int]:
    """The storages of parameters, buffers and inputs."""
    tensors = [*module.parameters(), *module.buffers(), *tree_leaves(given)]
    return {
        t.untyped_storage()._cdata
        for t in tensors
        if isinstance(t, torch.Tensor) and t.layout is torch.strided
    }


def _device_of(module: nn.Module) -> str:
    for tensor in (*module.parameters(), *module.buffers()):
        return str(tensor.device.type)
    raise ApplyFailed(
        f"{type(module).__name__} has no parameters, so it is not known for which device to lower its "
        "precision. Name a module that has."
    )
