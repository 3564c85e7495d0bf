"""`torch.device(0)`, which without an accelerator raises, for the emulated device."""

from __future__ import annotations

import copyreg
from typing import Any

import torch

from torchtrim.dispatch.patches import Patches
from torchtrim.emulator.moves import is_cuda

_OWN: Any = torch.device


class _SameType(type):
    """The type of a stand-in that is equal to torch's own type, and has its instances."""

    def __instancecheck__(cls, thing: object) -> bool:
        return isinstance(thing, _OWN)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, _OWN)

    def __eq__(cls, other: object) -> bool:
        return other is _OWN or other is cls

    def __hash__(cls) -> int:
        return hash(_OWN)


class _Device(metaclass=_SameType):
    """Creates torch's own devices; a number alone is one of the emulated device."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        number = args[0] if len(args) == 1 and not options else None
        if type(number) is int and is_cuda(number):
            return _OWN("cuda", number)
        return _OWN(*args, **options)


_Device.__module__, _Device.__name__, _Device.__qualname__ = "torch", "device", "device"


def patch_device(patches: Patches) -> None:
    """Replace `torch.device`. Pickled objects name `torch.device`, as without the patch."""
    patches.replace(torch, "device", _Device)
    copyreg.pickle(_OWN, lambda one: (_Device, _parts(one)))
    patches.on_undo(copyreg.dispatch_table.pop, _OWN, None)


def _parts(device: torch.device) -> tuple[Any, ...]:
    return (device.type,) if device.index is None else (device.type, device.index)
