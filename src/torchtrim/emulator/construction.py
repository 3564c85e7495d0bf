"""Construct tensors and generators on the emulated device from host data."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors

from torchtrim.dispatch.modes import tensors_among
from torchtrim.dispatch.patches import Patches
from torchtrim.emulator.moves import DeviceMover, is_cuda
from torchtrim.emulator.tags import DEVICE, HOST

_LIFT = torch.ops.aten.lift_fresh.default
_READ = torch.ops.aten._local_scalar_dense.default
_SPARSE = ("coo", "csr", "csc", "bsr", "bsc", "compressed")
_KINDS = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
# Tensor types in `torch.cuda`, by name.
TYPES = {f"{kind}Tensor": getattr(torch, f"{kind}Tensor").dtype for kind in _KINDS}


class Construction:
    """Replaces `torch.tensor`, `as_tensor`, `asarray`, `new_tensor`, `cuda.FloatTensor` and `Generator`."""

    def __init__(self, patches: Patches, mover: DeviceMover) -> None:
        self._patches = patches
        self._mover = mover

    def install(self) -> None:
        """Replace the constructors."""
        _device_constructors()  # torch caches the functions it finds: its own, not these.
        self._patches.replace(torch, "tensor", self._from_data(torch.tensor))
        for name in ("as_tensor", "asarray"):
            self._patches.replace(torch, name, self._shared(getattr(torch, name)))
        sparse = ((torch, f"sparse_{kind}_tensor") for kind in _SPARSE)
        for owner, name in ((torch.nested, "nested_tensor"), *sparse):
            self._patches.replace(owner, name, self._of_parts(getattr(owner, name)))
        self._patches.replace(torch.Tensor, "new_tensor", self._new_tensor)
        self._patches.replace(torch.Tensor, "new", self._new(torch.Tensor.new))
        for name, dtype in TYPES.items():
            self._patches.replace(torch.cuda, name, self._legacy(name, dtype))
        self._patches.replace(torch, "Generator", Generator)
        self._patches.replace(
            torch, "set_default_tensor_type", _set_default_type(torch.set_default_tensor_type)
        )

    def _from_data(self, own: Any) -> Any:
        tags = self._mover.tags

        @functools.wraps(own)
        def tensor(data: Any, **options: Any) -> torch.Tensor:
            device = options.get("device")
            if isinstance(data, torch.Tensor) and tags.on_device(data):
                on = True if device is None else is_cuda(device)
                copied = self._mover.moved(data.detach(), on, dtype=options.get("dtype"), copy=True)
                return copied.requires_grad_(bool(options.get("requires_grad")))
            # Record the reads of a list of tensors, one number at a time, which no mode sees.
            for part in tensors_among(data) if isinstance(data, (list, tuple)) else ():
                if tags.on_device(part):
                    for number in part.detach().reshape(-1).unbind():
                        _READ(number)
            if _wants_device(device):
                return self._uploaded(own, data, options)
            pinned = options.pop("pin_memory", False)
            made: torch.Tensor = own(data, **options)
            if pinned:
                tags.pin(made)
            return made

        return tensor

    def _of_parts(self, own: Any) -> Any:
        mover = self._mover

        @functools.wraps(own)
        def of_parts(*parts: Any, **options: Any) -> torch.Tensor:
            if not _wants_device(options.get("device")):
                return own(*parts, **options)  # type: ignore[no-any-return]
            graded = options.pop("requires_grad", False)
            made = own(*parts, **{**options, "device": HOST})
            return mover.moved(made, True).requires_grad_(graded)

        return of_parts

    def _shared(self, own: Any) -> Any:
        @functools.wraps(own)
        def shared(data: Any, *args: Any, **options: Any) -> torch.Tensor:
            options = {**dict(zip(("dtype", "device"), args, strict=False)), **options}
            device = options.get("device")
            here = isinstance(data, torch.Tensor) and self._mover.tags.on_device(data)
            if not (_wants_device(device) or here) or (here and device == "meta"):
                return own(data, **options)  # type: ignore[no-any-return]
            if isinstance(data, torch.Tensor):
                on = here if device is None else is_cuda(device)
                dtype, copy = options.get("dtype"), bool(options.get("copy"))
                return self._mover.moved(data, on, dtype=dtype, copy=copy)
            return self._uploaded(own, data, options)

        return shared

    def _uploaded(self, own: Any, data: Any, options: dict[str, Any]) -> torch.Tensor:
        """Construct a tensor on the device from host data: in torch, an upload that is not an operator."""
        options = {**options, "device": "cpu"}
        graded = options.pop("requires_grad", False)
        options.pop("pin_memory", None)
        with torch._C._DisableTorchDispatch():
            made: torch.Tensor = own(data, **options).detach().clone()
        self._mover.tags.put(made)
        made = _LIFT(made)
        return made.requires_grad_() if graded else made

    @property
    def _new_tensor(self) -> Any:
        own = torch.Tensor.new_tensor
        mover, uploaded = self._mover, self._uploaded

        def new_tensor(self: Any, data: Any, **options: Any) -> torch.Tensor:
            device = options.pop("device", None)
            on = mover.tags.on_device(self) if device is None else is_cuda(device)
            if not on:
                return own(self, data, **options)
            return uploaded(lambda data, device, **rest: own(self, data, **rest), data, options)

        return new_tensor

    def _new(self, own: Any) -> Any:
        mover = self._mover

        def new(self: Any, *args: Any, **options: Any) -> torch.Tensor:
            made: torch.Tensor = own(self, *args, **options)
            if mover.tags.on_device(self):
                mover.tags.put(made)
            return made

        return new

    def _legacy(self, name: str, dtype: torch.dtype) -> Any:
        own, uploaded, tags = torch.tensor, self._uploaded, self._mover.tags

        class LegacyType(type):
            def __instancecheck__(cls, thing: object) -> bool:
                if not isinstance(thing, torch.Tensor) or thing.dtype != dtype:
                    return False
                return tags.on_device(thing)

        class Legacy(metaclass=LegacyType):
            def __new__(cls, *data: Any) -> Any:
                if all(isinstance(size, int) for size in data) or isinstance(data[0], torch.Size):
                    return torch.empty(*(data or (0,)), dtype=dtype, device=DEVICE)
                return uploaded(own, data[0], {"dtype": dtype})

        Legacy.__name__, Legacy.__module__ = name, "torch.cuda"
        Legacy.dtype = dtype  # type: ignore[attr-defined]
        return Legacy


def _set_default_type(own: Any) -> Any:
    def set_default_tensor_type(kind: Any) -> None:
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
        on = name.startswith("torch.cuda.")
        own(name.replace("torch.cuda.", "torch.", 1) if on else kind)
        torch.set_default_device(DEVICE if on else None)

    return set_default_tensor_type


def _wants_device(device: Any) -> bool:
    return is_cuda(_default_device() if device is None else device)


def _default_device() -> torch.device:
    """Like `torch.get_default_device`, which creates a tensor to find out."""
    modes: Any = _get_current_function_mode_stack
    for mode in reversed(modes()):
        if isinstance(mode, DeviceContext):
            return mode.device
    return HOST


_Meta: Any = type(torch._C.Generator)


class _AnyGenerator(_Meta):  # type: ignore[misc]
    def __instancecheck__(self, thing: object) -> bool:
        return isinstance(thing, torch._C.Generator)


class Generator(torch._C.Generator, metaclass=_AnyGenerator):
    """A generator that reports the device and draws the CPU's numbers."""

    _of_device = False

    def __new__(cls, device: Any = None) -> Any:
        made: Any = super().__new__(cls, device="cpu")  # type: ignore[call-arg]
        made._of_device = is_cuda(device)
        return made

    def __init__(self, device: Any = None) -> None: ...

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The reported device."""
        return DEVICE if self._of_device else torch.device("cpu")
