"""Start and end the emulation of a device in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import scatter_gather
from torch.optim import optimizer as optimizers
from torch.optim import swa_utils
from torch.utils import _foreach_utils

from torchtrim.dispatch.calls import heard_by, tell_synchronized
from torchtrim.dispatch.modes import enter_below, leave
from torchtrim.dispatch.patches import Patches
from torchtrim.dispatch.subclasses import patch_subclasses
from torchtrim.dispatch.threads import enter_in_threads
from torchtrim.emulator.autocast import Autocast
from torchtrim.emulator.composites import Composites
from torchtrim.emulator.construction import Construction
from torchtrim.emulator.devices import patch_device
from torchtrim.emulator.mode import Accelerator
from torchtrim.emulator.moves import DeviceMover, is_cuda
from torchtrim.emulator.orders import Orders, StreamOrder
from torchtrim.emulator.runtime import DEFAULT, DeviceModel, Runtime
from torchtrim.emulator.streams import current_stream
from torchtrim.emulator.tags import DEVICE, Tags
from torchtrim.emulator.tensors import patch_tensors
from torchtrim.emulator.workspaces import Workspaces
from torchtrim.errors import UsageError

_BEFORE_CPU = 5  # Below 10, the priority of torch's own restore function of CPU tensors.


def patch_grouping(patches: Patches, tags: Tags) -> None:
    """Group an optimizer's parameters by emulated device, which torch does in C++."""
    own = torch._C._group_tensors_by_device_and_dtype

    def device_of(lists: Any, device: Any) -> Any:
        first = next((tensor for tensor in lists[0] if tensor is not None), None)
        return DEVICE if first is not None and tags.on_device(first) else device

    def group(tensors: Any, with_indices: bool = False) -> Any:
        return {
            (device_of(lists, device), dtype): (lists, indices)
            for (device, dtype), (lists, indices) in own(tensors, with_indices).items()
        }

    patches.replace(torch._C, "_group_tensors_by_device_and_dtype", group)
    for module in (_foreach_utils, optimizers, swa_utils):
        if getattr(module, "_group_tensors_by_device_and_dtype", None) is own:
            patches.replace(module, "_group_tensors_by_device_and_dtype", group)


def patch_parallel(patches: Patches, mover: DeviceMover) -> None:
    """Replace C++ functions that `DataParallel` needs and that builds without CUDA lack."""

    class Scatter:
        @staticmethod
        def apply(devices: Any, sizes: Any, dim: int, tensor: torch.Tensor) -> Any:
            return (mover.moved(tensor, True),)

    patches.replace(scatter_gather, "Scatter", Scatter)


def patch_compile(patches: Patches, noted: set[str]) -> None:
    """Run compiled functions eagerly."""

    def compile_(model: Any = None, **options: Any) -> Any:
        noted.add("torch.compile was ignored: an emulated device runs eagerly")
        return model if model is not None else lambda function: function

    def compile_module(self: Any, *args: Any, **options: Any) -> None:
        noted.add("Module.compile was ignored: an emulated device runs eagerly")

    patches.replace(torch, "compile", compile_)
    patches.replace(torch.nn.Module, "compile", compile_module)


def patch_files(patches: Patches, tags: Tags) -> None:
    """Save tensors with their emulated device, and load them onto it."""

    def location(storage: Any) -> str | None:
        return "cuda:0" if tags.holds(_untyped(storage)) else None

    def restore(storage: Any, where: str) -> Any:
        if not where.startswith("cuda"):
            return None
        tags.put_storage(_untyped(storage))
        tell_synchronized("upload", current_stream())
        return storage

    def load_script(file: Any, map_location: Any = None, **options: Any) -> Any:
        on = is_cuda(map_location)
        module = own_load(file, "cpu" if on else map_location, **options)
        return module.to("cuda") if on else module

    own_load = patches.replace(torch.jit, "load", load_script)
    registry = torch.serialization._package_registry
    torch.serialization.register_package(_BEFORE_CPU, location, restore)
    patches.on_undo(registry.remove, (_BEFORE_CPU, location, restore))


def _untyped(storage: Any) -> Any:
    return getattr(storage, "_untyped_storage", storage)


_running: list[Emulation] = []


class Emulation:
    """An emulated device between `begin` and `end`. `notes`: deviations from a real device.

    `order`: the order of stream work, or None to run it at once.
    """

    def __init__(self, model: DeviceModel = DEFAULT, order: StreamOrder | None = None) -> None:
        self.workspaces = Workspaces(model.capability())
        self.accelerator = Accelerator(self.workspaces)
        self.tags = self.accelerator.tags
        self.orders = None if order is None else Orders(order, self.tags)
        self.accelerator.orders = self.orders
        self._hearing = contextlib.ExitStack()
        self.notes: set[str] = set()
        self.device = f"emulated {model.short}" if model.short else "emulated"
        self._patches = Patches()
        self._target = model.target()
        self._runtime = Runtime(self._patches, self.tags, model)
        self.counters = self._runtime.counters

    def begin(self) -> None:
        """Patch the functions that query a device. Raises `UsageError` if a device is already emulated."""
        if _running:
            raise UsageError("a device is already emulated, and a process can have only one.")
        patches, tags = self._patches, self.tags
        mover = DeviceMover(self.accelerator)
        self._runtime.install()
        patch_subclasses(patches)
        patch_tensors(patches, self.accelerator, mover)
        Construction(patches, mover).install()
        patch_device(patches)
        Autocast(patches, tags).install()
        Composites(patches, self.accelerator, self._target).install()
        enter_in_threads(patches, lambda: self.accelerator, ours=True)
        patch_grouping(patches, tags)
        patch_parallel(patches, mover)
        patch_compile(patches, self.notes)
        patch_files(patches, tags)
        if self.orders is not None:
            self._hearing.enter_context(heard_by(self.orders))
        enter_below(self.accelerator)
        _running.append(self)

    def adopt(self, root: torch.nn.Module) -> None:
        """Treat a root module on the host, and tensors used together with it, as on the device."""
        tensors = [*root.parameters(), *root.buffers()]
        if not any(self.tags.on_device(tensor) for tensor in tensors):
            self.accelerator.adopts = True
            for tensor in tensors:
                self.tags.put(tensor)

    def end(self) -> None:
        """Remove all patches. Tensors on the device become plain CPU tensors."""
        _running.remove(self)
        if self.orders is not None:
            self.orders.synchronized("", None)  # Run all pending work.
        self._hearing.close()
        leave(self.accelerator)
        self._patches.undo()


def current() -> Emulation | None:
    """Return the emulation running in this process."""
    return _running[-1] if _running else None


@contextlib.contextmanager
def emulate(model: DeviceModel = DEFAULT, streams: str = "") -> Iterator[Emulation]:
    """Emulate a CUDA device inside the block. Does nothing if there is a real one.

    `streams`: the order of stream work, as for `--streams`. Raises `UsageError`.
    """
    emulation = Emulation(model, StreamOrder.parse(streams) if streams else None)
    emulation.begin()
    try:
        yield emulation
    finally:
        emulation.end()
