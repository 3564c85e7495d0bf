"""Patch a tensor's device properties and its methods that move or read it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.dlpack import DLDeviceType

from torchtrim.dispatch.calls import tell_read, tell_synchronized
from torchtrim.dispatch.modes import fake_mode
from torchtrim.dispatch.patches import Patches
from torchtrim.emulator.mode import Accelerator
from torchtrim.emulator.moves import DeviceMover, is_cuda
from torchtrim.emulator.moves import is_cuda as is_cuda_device
from torchtrim.emulator.streams import current_stream
from torchtrim.emulator.tags import DEVICE, HOST, Tags

Tensor: Any = torch.Tensor
_DEVICE_PLACE = 6  # Of the device among the arguments of `_make_wrapper_subclass` after the class.


def patch_tensors(patches: Patches, accelerator: Accelerator, mover: DeviceMover) -> None:
    """Patch everything that queries, moves, reads or exports a tensor or a storage."""
    _patch_properties(patches, mover.tags)
    _patch_gradients(patches, accelerator)
    _patch_moves(patches, mover)
    _patch_reads(patches, mover, accelerator)
    _patch_storages(patches, mover.tags)
    _patch_exchange(patches, mover.tags)


def _patch_properties(patches: Patches, tags: Tags) -> None:
    """Make `device`, `is_cuda`, `is_cpu` and `get_device()` report the logical device."""
    own_device = Tensor.device.__get__
    own_cpu = Tensor.is_cpu.__get__
    own_number = Tensor.get_device

    # A subclass receives a property by the name of its getter.
    def device(self: Any) -> Any:
        return DEVICE if tags.on_device(self) else own_device(self)

    def is_cuda(self: Any) -> bool:
        return tags.on_device(self)

    def is_cpu(self: Any) -> Any:
        return not tags.on_device(self) and own_cpu(self)

    def get_device(self: Any) -> Any:
        return 0 if tags.on_device(self) else own_number(self)

    for getter in (device, is_cuda, is_cpu):
        patches.replace(Tensor, getter.__name__, property(getter))
    patches.replace(Tensor, "get_device", get_device)
    own_get_device = torch.get_device
    own_storage_device = torch.UntypedStorage.device.__get__
    own_wrapper = Tensor._make_wrapper_subclass

    def device_number(input: Any) -> Any:
        return 0 if tags.on_device(input) else own_get_device(input)

    def storage_device(storage: Any) -> Any:
        return DEVICE if tags.holds(storage) else own_storage_device(storage)

    patches.replace(torch, "get_device", device_number)
    patches.replace(torch.UntypedStorage, "device", property(storage_device))
    patches.replace(torch.UntypedStorage, "is_cuda", property(tags.holds))

    def make_wrapper_subclass(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        """Create the wrapper on the CPU, since autograd would query the driver."""

        def settled(given: Any) -> Any:
            return HOST if is_cuda_device(given) and hasattr(cls, "__tensor_flatten__") else given

        if len(args) <= _DEVICE_PLACE:
            return own_wrapper(cls, *args, device=settled(device), **kwargs)
        before, (given, *after) = args[:_DEVICE_PLACE], args[_DEVICE_PLACE:]
        return own_wrapper(cls, *before, settled(given), *after, **kwargs)

    patches.replace(Tensor, "_make_wrapper_subclass", staticmethod(make_wrapper_subclass))


def _patch_gradients(patches: Patches, accelerator: Accelerator) -> None:
    """Patch `grad`, which must be on its tensor's device; autograd moves the gradient of a number."""
    tags = accelerator.tags
    own = Tensor.grad

    def get(self: Any) -> Any:
        gradient = own.__get__(self)
        if gradient is not None and not gradient.dim() and not tags.on_device(self):
            tags.take(gradient)
        return gradient

    def put(self: Any, gradient: Any) -> None:
        if isinstance(gradient, torch.Tensor) and not accelerator.adopts:
            on = tags.on_device(self)
            if tags.on_device(gradient) != on and not (gradient.is_meta or self.is_meta):
                raise RuntimeError("assigned grad has data located on a different device")
        own.__set__(self, gradient)

    patches.replace(Tensor, "grad", property(get, put, lambda self: own.__delete__(self)))


def _patch_moves(patches: Patches, mover: DeviceMover) -> None:
    """Patch `to`, `cuda`, `cpu`, `type`, `type_as`, `copy_` and the parser of `Module.to`."""
    tags = mover.tags

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        moved = mover.to(self, args, kwargs) if isinstance(self, torch.Tensor) else NotImplemented
        return own_to(self, *args, **kwargs) if moved is NotImplemented else moved

    def cuda(
        self: Any, device: Any = None, non_blocking: bool = False, memory_format: Any = None
    ) -> Any:
        on = device is None or is_cuda(device)
        return mover.moved(self, on, **_given(non_blocking, memory_format))

    def cpu(self: Any, memory_format: Any = None) -> Any:
        return mover.moved(self, False, **_given(False, memory_format))

    def type_(self: Any, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            name = own_type(self)
            return name.replace("torch.", "torch.cuda.", 1) if tags.on_device(self) else name
        if isinstance(dtype, torch.dtype):
            return to(self, dtype, non_blocking)
        name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
        on = name.startswith("torch.cuda.")
        plain = getattr(torch, name.rpartition(".")[2]).dtype
        return mover.moved(self, on, dtype=plain, non_blocking=non_blocking)

    def type_as(self: Any, other: Any) -> Any:
        return mover.moved(self, tags.on_device(other), dtype=other.dtype)

    def copy_(self: Any, src: Any, non_blocking: bool = False) -> Any:
        """Copy, with the gradient copied back to the source's device."""
        if fake_mode() is not None:  # the method would query the driver
            return torch.ops.aten.copy_.default(self, src, non_blocking)
        on = tags.on_device(self)
        if src.requires_grad and torch.is_grad_enabled() and tags.on_device(src) != on:
            src = mover.moved(src, on, **_given(non_blocking, None))
        return own_copy(self, src, non_blocking)

    def parse_to(*args: Any, **kwargs: Any) -> Any:
        """Parse arguments of `Module.to`, including device numbers and example tensors."""
        if args and isinstance(args[0], int) and is_cuda(args[0]):
            args = (DEVICE, *args[1:])
        parsed = own_parse(*args, **kwargs)
        like = args[0] if args else kwargs.get("other")
        if isinstance(like, torch.Tensor) and tags.on_device(like):
            return (DEVICE, *parsed[1:])
        return parsed

    own_to = patches.replace(Tensor, "to", _overridable(to))
    own_type = patches.replace(Tensor, "type", _overridable(type_, "type"))
    own_copy = patches.replace(Tensor, "copy_", _overridable(copy_))
    own_parse = patches.replace(torch._C._nn, "_parse_to", parse_to)
    patches.replace(Tensor, "cuda", _overridable(cuda))
    patches.replace(Tensor, "cpu", _overridable(cpu))
    patches.replace(Tensor, "type_as", _overridable(type_as))


def _patch_reads(patches: Patches, mover: DeviceMover, accelerator: Accelerator) -> None:
    """Patch `numpy`, `tolist`, pinning, deep copies, `record_stream` and new tensors from data."""
    tags = mover.tags

    def numpy(self: Any, *, force: bool = False) -> Any:
        if tags.on_device(self):
            if accelerator.adopts:
                mover.moved(self.detach(), False)
                return own_numpy(self, force=force)
            if not force:
                raise TypeError(
                    "can't convert cuda:0 device type tensor to numpy. "
                    "Use Tensor.cpu() to copy the tensor to host memory first."
                )
            self = mover.moved(self.detach(), False)
        tell_read(self)
        return own_numpy(self, force=force)

    def tolist(self: Any) -> Any:
        host = mover.moved(self.detach(), False) if tags.on_device(self) else self
        tell_read(host)
        return own_tolist(host)

    def pin_memory(self: Any, device: Any = None) -> Any:
        if tags.on_device(self):
            raise RuntimeError(
                "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"
            )
        if tags.is_pinned(self):
            return self
        pinned = self.detach().clone() if not self.requires_grad else self.clone()
        tags.pin(pinned)
        return pinned

    def copying(own: Any) -> Any:
        def deepcopy(self: Any, memo: Any) -> Any:
            copied = own(self, memo)
            if tags.on_device(self):
                tags.put(copied)
            return copied

        return deepcopy

    def record_stream(self: Any, stream: Any) -> None:
        if accelerator.orders is not None:
            accelerator.orders.keep(self, stream)

    own_numpy = patches.replace(Tensor, "numpy", numpy)
    own_tolist = patches.replace(Tensor, "tolist", tolist)
    own_is_shared = Tensor.is_shared
    for owner in (Tensor, torch.nn.Parameter):
        patches.replace(owner, "__deepcopy__", copying(owner.__deepcopy__))
    patches.replace(Tensor, "pin_memory", pin_memory)
    patches.replace(Tensor, "is_pinned", lambda self, device=None: tags.is_pinned(self))
    patches.replace(Tensor, "record_stream", record_stream)
    patches.replace(Tensor, "is_shared", lambda self: tags.on_device(self) or own_is_shared(self))


def _patch_storages(patches: Patches, tags: Tags) -> None:
    """Keep a copied storage on its source's device, and treat a resized one as a new allocation."""
    storage: Any = torch.UntypedStorage

    def copied(self: Any, on: bool, non_blocking: bool = False) -> Any:
        made = storage(self.nbytes())
        if on:
            tags.put_storage(made)
        return made.copy_(self, non_blocking)

    def to(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        on = is_cuda(device)
        return self if tags.holds(self) == on else copied(self, on, non_blocking)

    def write(self: Any, *args: Any) -> Any:
        if tags.holds(self):
            tell_synchronized("copy-to-host", current_stream())
        return own_write(self, *args)

    def resize_(self: Any, size: int) -> Any:
        result = own_resize(self, size)
        tags.resized(self)
        return result

    own_resize = patches.replace(storage, "resize_", resize_)
    own_write = patches.replace(storage, "_write_file", write)
    patches.replace(storage, "clone", lambda self: copied(self, tags.holds(self)))
    patches.replace(storage, "cpu", lambda self: to(self, device="cpu"))
    patches.replace(storage, "to", to)


def _patch_exchange(patches: Patches, tags: Tags) -> None:
    """Patch DLPack: other libraries see the device, and torch gets its own tensors back."""

    def device(self: Any) -> Any:
        return (DLDeviceType.kDLCUDA, 0) if tags.on_device(self) else own_device(self)

    def export(self: Any, **options: Any) -> Any:
        if tags.on_device(self):
            raise RuntimeError("Unsupported device in DLTensor.")
        return own_export(self, **options)

    def from_dlpack(source: Any, **options: Any) -> Any:
        if isinstance(source, torch.Tensor) and tags.on_device(source):
            source = library.to_dlpack(source)
        made = own_from(source, **options)
        if (kept := tags.storage_at(made.data_ptr())) is None:
            return made
        return made.set_(kept, made.storage_offset(), made.shape, made.stride())

    own_device = patches.replace(Tensor, "__dlpack_device__", _overridable(device))
    own_export = patches.replace(Tensor, "__dlpack__", _overridable(export))
    library: Any = torch.utils.dlpack
    own_from = patches.replace(library, "from_dlpack", from_dlpack)
    patches.replace(torch, "from_dlpack", from_dlpack)


def _overridable(method: Any, name: str | None = None) -> Any:
    """Make a method overridable by `__torch_function__`, like torch's own."""
    method.__name__ = name or method.__name__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_lazy(self):
            with torch._C.DisableTorchFunctionSubclass():
                return method(self, *args, **kwargs)
        if has_torch_function_unary(self):
            return handle_torch_function(call, (self,), self, *args, **kwargs)
        return method(self, *args, **kwargs)

    return call


def _given(non_blocking: bool, memory_format: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"non_blocking": True} if non_blocking else {}
    if memory_format is not None:
        options["memory_format"] = memory_format
    return options
