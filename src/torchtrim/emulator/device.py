"""Begins and ends the emulation of a device in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from torchtrim.dispatch.calls import heard_by
from torchtrim.dispatch.modes import enter_below, leave
from torchtrim.dispatch.patches import Patches
from torchtrim.emulator.autocast import Autocast
from torchtrim.emulator.composites import Composites
from torchtrim.emulator.construction import Construction
from torchtrim.emulator.mode import Accelerator
from torchtrim.emulator.model import DEFAULT, DeviceModel
from torchtrim.emulator.moves import Mover
from torchtrim.emulator.orders import Order, Orders
from torchtrim.emulator.runtime import Runtime
from torchtrim.emulator.surroundings import (
    patch_compile,
    patch_files,
    patch_grouping,
    patch_parallel,
    patch_threads,
)
from torchtrim.emulator.tensors import (
    patch_exchange,
    patch_gradients,
    patch_moves,
    patch_properties,
    patch_reads,
    patch_storages,
)
from torchtrim.errors import UsageError

_running: list[Emulation] = []


class Emulation:
    """One emulated device between `begin` and `end`. `notes` say what it did not do as a device would.

    `order`: in which order its streams do their work; at once where it is None.
    """

    def __init__(self, model: DeviceModel = DEFAULT, order: Order | None = None) -> None:
        self.accelerator = Accelerator()
        self.tags = self.accelerator.tags
        self.orders = None if order is None else Orders(order, self.tags)
        self.accelerator.orders = self.orders
        self._hearing = contextlib.ExitStack()
        self.notes: set[str] = set()
        self.device = f"emulated {model.short}" if model.short else "emulated"
        self._patches = Patches()
        self._runtime = Runtime(self._patches, self.tags, model)
        self.counters = self._runtime.counters

    def begin(self) -> None:
        """Replace what asks for a device. Raises `UsageError` where one is emulated already."""
        if _running:
            raise UsageError("a device is emulated already, and there is one for a process.")
        patches, tags = self._patches, self.tags
        mover = Mover(self.accelerator)
        self._runtime.install()
        patch_properties(patches, tags)
        patch_gradients(patches, self.accelerator)
        patch_moves(patches, mover)
        patch_reads(patches, mover, self.accelerator)
        patch_storages(patches, tags)
        patch_exchange(patches, tags)
        Construction(patches, mover).install()
        Autocast(patches, tags).install()
        Composites(patches, self.accelerator).install()
        patch_threads(patches, self.accelerator)
        patch_grouping(patches, tags)
        patch_parallel(patches, mover)
        patch_compile(patches, self.notes)
        patch_files(patches, tags)
        if self.orders is not None:
            self._hearing.enter_context(heard_by(self.orders))
        enter_below(self.accelerator)
        _running.append(self)

    def adopt(self, root: torch.nn.Module) -> None:
        """Take a root on the host as if its author had put it, and what it meets, on the device."""
        tensors = [*root.parameters(), *root.buffers()]
        if not any(self.tags.on_device(tensor) for tensor in tensors):
            self.accelerator.adopts = True
            for tensor in tensors:
                self.tags.put(tensor)

    def end(self) -> None:
        """Put everything back. Tensors that lay on the device are plain CPU tensors from then on."""
        _running.remove(self)
        if self.orders is not None:
            self.orders.finish()
        self._hearing.close()
        leave(self.accelerator)
        self._patches.undo()


def current() -> Emulation | None:
    """The emulation that runs in this process."""
    return _running[-1] if _running else None


@contextlib.contextmanager
def emulate(model: DeviceModel = DEFAULT, streams: str = "") -> Iterator[Emulation]:
    """Emulate a CUDA device for a while; nothing is done where there is a real one.

    `streams`: the order of their work, as `--streams` takes it. Raises `UsageError`.
    """
    emulation = Emulation(model, Order.parse(streams) if streams else None)
    emulation.begin()
    try:
        yield emulation
    finally:
        emulation.end()
