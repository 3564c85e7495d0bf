"""Start the emulation when a script requests a missing device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from torchtrim.dispatch.modes import is_asking
from torchtrim.dispatch.patches import Patches
from torchtrim.dispatch.places import Places
from torchtrim.emulator.construction import TYPES, Generator
from torchtrim.emulator.device import Emulation
from torchtrim.emulator.moves import is_cuda

_NEED_A_DEVICE = (
    *("_lazy_init", "init", "current_device", "set_device", "get_device_name"),
    "get_device_properties",
)
_TAKE_A_DEVICE = (
    *("tensor", "as_tensor", "asarray", "load", "set_default_device", "set_default_tensor_type"),
)

_NAMED = ("torch.cuda", "torch.amp")
"""Modules of torch whose caller has named CUDA. The others test for it whatever a script computes on:
`DataParallel`, forked generators, fake tensors, traces."""


class OnDemand:
    """Starts the emulation when the user's source tests for CUDA, or any code requests a CUDA device.

    Until then, a library that tests for CUDA finds none.
    """

    def __init__(self, emulation: Emulation, project: str) -> None:
        self._emulation = emulation
        self._places = Places(project)
        self._patches = Patches()

    def arm(self) -> None:
        """Patch the functions that test for or request a device."""
        cuda: Any = torch.cuda
        for name in ("is_available", "device_count"):
            self._ask(cuda, name, self._tests)
        for name in ("is_available", "device_count", "current_accelerator"):
            self._ask(torch.accelerator, name, self._tests_accelerator)
        for name in _NEED_A_DEVICE:
            self._ask(cuda, name, lambda *_, **__: True)
        self._ask(torch.Tensor, "cuda", lambda *_, **__: True)
        for name in _TAKE_A_DEVICE:
            self._ask(torch, name, _names_cuda)
        for name in ("to", "type", "new_tensor"):
            self._ask(torch.Tensor, name, _names_cuda)
        self._ask_generator()
        for name, dtype in TYPES.items():
            self._patches.replace(cuda, name, _asking_type(name, dtype, self._begin))

    def _ask_generator(self) -> None:
        """Patch `torch.Generator` by a class, so that type checks still work."""

        class Asking(Generator):
            def __new__(cls, device: Any = None) -> Any:
                if not is_cuda(device):
                    return super().__new__(cls, device)
                begin()
                return Generator(device)

        # A certificate compares its name with that of a program in which torch began first.
        Asking.__name__ = Asking.__qualname__ = Generator.__name__
        begin = self._begin
        self._patches.replace(torch, "Generator", Asking)

    def _begin(self) -> None:
        self.disarm()
        self._emulation.begin()

    def disarm(self) -> None:
        """Remove the patches."""
        self._patches.undo()

    def _tests(self, *args: Any, **kwargs: Any) -> bool:
        return self._is_for_user(sys._getframe(2), *_NAMED)

    def _tests_accelerator(self, *args: Any, **kwargs: Any) -> bool:
        return self._is_for_user(sys._getframe(2))

    def _is_for_user(self, frame: FrameType, *named: str) -> bool:
        """Return True for a test by the user's source, not by an optimizer or a loader of torch."""
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("torchtrim.", "torch.")) and not module.startswith(named):
            return False
        spot, _ = self._places.find(frame)
        return spot is not None and self._places.is_users(spot)

    def _ask(self, owner: Any, name: str, concerns: Any) -> None:
        own = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if is_asking() or not concerns(*args, **kwargs):
                return own(*args, **kwargs)
            self._begin()
            return getattr(owner, name)(*args, **kwargs)

        self._patches.replace(owner, name, call)


def _names_cuda(*args: Any, **kwargs: Any) -> bool:
    values = (*args, *kwargs.values())
    return any(isinstance(value, (str, type, torch.device)) and _is_cuda(value) for value in values)


def _is_cuda(value: str | type | torch.device) -> bool:
    name = f"{value.__module__}.{value.__name__}" if isinstance(value, type) else str(value)
    try:
        return name.startswith("torch.cuda.") or is_cuda(name)
    except RuntimeError:
        return False


def _asking_type(name: str, dtype: torch.dtype, begin: Callable[[], None]) -> type:
    """Return a stand-in for a type such as `torch.cuda.FloatTensor` that starts the emulation when called."""
    own = getattr(torch.cuda, name)

    class OnDemandType(type):
        def __instancecheck__(cls, thing: object) -> bool:
            now = getattr(torch.cuda, name)
            return isinstance(thing, own if now is cls else now)

    def make(cls: type, *data: Any) -> Any:
        if getattr(torch.cuda, name) is cls:
            begin()
        return getattr(torch.cuda, name)(*data)

    return OnDemandType(name, (), {"__module__": "torch.cuda", "__new__": make, "dtype": dtype})
