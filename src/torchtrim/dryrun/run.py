"""Begins and ends a dry run in this process."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import profiler

from torchtrim.dispatch.modes import enter_below, leave
from torchtrim.dispatch.patches import Patches
from torchtrim.dryrun.loader_sizes import patch_loaders
from torchtrim.dryrun.machine import machine
from torchtrim.dryrun.mode import Dry
from torchtrim.emulator.device import current as emulated

_running: list[Dry] = []


def current() -> Dry | None:
    """The dry run of this process."""
    return _running[-1] if _running else None


@contextlib.contextmanager
def dry_run(project: str, *, owned_only: bool, batch_size: int | None = None) -> Iterator[Dry]:
    """Run nothing for a while. `owned_only`: leave the numbers of what is there as they are.

    `batch_size`: what loaders that are made meanwhile give, if not what they would.
    """
    dry = Dry(project, owned_only=owned_only)
    patches = Patches()
    _patch_storages(patches, dry)
    _patch_compile(patches, dry)
    _patch_files(patches, dry)
    _patch_loaders(patches, dry, batch_size)
    _patch_profilers(patches)
    _running.append(dry)
    enter_below(dry)
    try:
        yield dry
    finally:
        leave(dry)
        _running.remove(dry)
        patches.undo()
        machine().save()


def _patch_storages(patches: Patches, dry: Dry) -> None:
    """What is done to storages past the operators: `copy.deepcopy` copies them, FSDP2 resizes them.

    A copy of a blank one is blank; one that is resized keeps its addresses and has another size.
    """
    original: Any = torch.UntypedStorage.clone
    resize: Any = torch.UntypedStorage.resize_
    nbytes: Any = torch.UntypedStorage.nbytes

    def clone(storage: Any) -> Any:
        if dry.blanks.holds(storage.data_ptr()):
            return dry.blanks.storage(storage.nbytes())
        return original(storage)

    def resize_(storage: Any, size: int) -> Any:
        if dry.blanks.holds(storage.data_ptr()):
            dry.blanks.resize(storage, size)
            if (emulation := emulated()) is not None:
                emulation.tags.resized(storage)
            return storage
        return resize(storage, size)

    def size_of(storage: Any) -> int:
        size = dry.blanks.resized(storage)
        return int(nbytes(storage)) if size is None else size

    patches.replace(torch.UntypedStorage, "resize_", resize_)
    patches.replace(torch.UntypedStorage, "nbytes", size_of)
    patches.replace(torch.UntypedStorage, "clone", clone)


def _patch_compile(patches: Patches, dry: Dry) -> None:
    """Compiled code runs as it is written: nobody knows what the compiler would fuse."""

    def compile_(model: Any = None, **options: Any) -> Any:
        dry.guesses.add("torch.compile: counted as it runs without; fused operators may need less")
        return model if model is not None else lambda given: given

    patches.replace(torch, "compile", compile_)
    if "torch._dynamo" in sys.modules:
        stance = torch.compiler.set_stance("force_eager")
        patches.on_undo(stance.__exit__, None, None, None)


def _patch_profilers(patches: Patches) -> None:
    """From where the program prepares a profiler on, none is started to try calls of operators."""
    prepare: Any = profiler.profile._prepare_trace
    machine().may_try(None)
    patches.on_undo(machine().may_try, None)

    def prepare_theirs(theirs: Any) -> None:
        machine().may_try(False)
        prepare(theirs)

    patches.replace(profiler.profile, "_prepare_trace", prepare_theirs)


def _patch_files(patches: Patches, dry: Dry) -> None:
    """Nothing is saved, since it would be zeros over somebody's weights; loaded files are mapped."""
    load: Any = torch.load

    def save(*_: Any, **__: Any) -> None:
        dry.guesses.add("torch.save: nothing was written")

    def load_mapped(file: Any, *args: Any, **options: Any) -> Any:
        if isinstance(file, (str, os.PathLike)) and "mmap" not in options:
            with contextlib.suppress(RuntimeError, ValueError):
                return load(file, *args, **options, mmap=True)
        return load(file, *args, **options)

    patches.replace(torch, "save", save)
    patches.replace(torch, "load", load_mapped)


def _patch_loaders(patches: Patches, dry: Dry, batch_size: int | None) -> None:
    """Loaders load in this process, and batches of the wanted size."""

    def seen(size: int) -> None:
        dry.batch_size = dry.batch_size or size

    patch_loaders(patches, batch_size, here=True, seen=seen)
