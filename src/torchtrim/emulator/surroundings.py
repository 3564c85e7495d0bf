"""What else asks a tensor for its device: threads, files, optimizers, the compiler."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.nn.parallel import scatter_gather
from torch.optim import optimizer as optimizers
from torch.optim import swa_utils
from torch.utils import _foreach_utils

from torchtrim.dispatch.calls import tell_synchronized
from torchtrim.dispatch.patches import Patches
from torchtrim.emulator.mode import Accelerator
from torchtrim.emulator.moves import Mover, is_cuda
from torchtrim.emulator.streams import current_stream
from torchtrim.emulator.tags import DEVICE, Tags

_BEFORE_CPU = 5


def patch_threads(patches: Patches, accelerator: Accelerator) -> None:
    """A thread that starts emulates too."""

    def run(self: threading.Thread) -> None:
        with accelerator:
            own(self)

    own = patches.replace(threading.Thread, "run", run)


def patch_grouping(patches: Patches, tags: Tags) -> None:
    """Optimizers group parameters by device, in C++."""
    own = torch._C._group_tensors_by_device_and_dtype

    def group(tensors: Any, with_indices: bool = False) -> Any:
        return {
            (_device_of(lists, device, tags), dtype): (lists, indices)
            for (device, dtype), (lists, indices) in own(tensors, with_indices).items()
        }

    patches.replace(torch._C, "_group_tensors_by_device_and_dtype", group)
    for module in (_foreach_utils, optimizers, swa_utils):
        original = getattr(module, "_group_tensors_by_device_and_dtype", None)
        if original is own:
            patches.replace(module, "_group_tensors_by_device_and_dtype", group)


def _device_of(lists: Any, device: Any, tags: Tags) -> Any:
    first = next((tensor for tensor in lists[0] if tensor is not None), None)
    return DEVICE if first is not None and tags.on_device(first) else device


def patch_parallel(patches: Patches, mover: Mover) -> None:
    """`DataParallel` of one device asks C++ that is not there on a machine without a GPU."""

    class Scatter:
        @staticmethod
        def apply(devices: Any, sizes: Any, dim: int, tensor: torch.Tensor) -> Any:
            return (mover.moved(tensor, True),)

    patches.replace(scatter_gather, "Scatter", Scatter)


def patch_compile(patches: Patches, noted: set[str]) -> None:
    """An emulated program runs eagerly."""

    def compile_(model: Any = None, **options: Any) -> Any:
        noted.add("torch.compile was left out: an emulated device runs eagerly")
        return model if model is not None else lambda function: function

    def compile_module(self: Any, *args: Any, **options: Any) -> None:
        noted.add("Module.compile was left out: an emulated device runs eagerly")

    patches.replace(torch, "compile", compile_)
    patches.replace(torch.nn.Module, "compile", compile_module)


def patch_files(patches: Patches, tags: Tags) -> None:
    """Saved tensors say `cuda:0`, and those that do are loaded onto the device."""

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
    patches.on_undo(_remove, registry, restore)


def _untyped(storage: Any) -> Any:
    return getattr(storage, "_untyped_storage", storage)


def _remove(registry: list[Any], restore: Any) -> None:
    registry[:] = [entry for entry in registry if entry[2] is not restore]
