"""Begins and ends a dry run in this process, and patches loaders to batches of a given size."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from torchtrim.dispatch.modes import enter_below, leave
from torchtrim.dispatch.patches import Patches
from torchtrim.dispatch.threads import enter_in_threads
from torchtrim.dryrun.mode import Dry
from torchtrim.dryrun.workspace import machine
from torchtrim.emulator.device import current as emulated

_running: list[Dry] = []


def current() -> Dry | None:
    """Return the dry run of this process, or None."""
    return _running[-1] if _running else None


@contextlib.contextmanager
def dry_run(project: str, *, owned_only: bool, batch_size: int | None = None) -> Iterator[Dry]:
    """Run operators without computing inside the block. `owned_only`: do not change existing data.

    `batch_size` overrides the batch size of loaders created inside the block.
    """
    dry = Dry(project, owned_only=owned_only)
    patches = Patches()
    _patch_storages(patches, dry)
    _patch_compile(patches, dry)
    _patch_files(patches, dry)
    _patch_finite(patches, dry)
    _patch_tolerance(patches, dry)
    _patch_loaders(patches, batch_size, here=True, seen=dry.note_batch_size)
    _patch_profilers(patches)
    enter_in_threads(patches, lambda: dry)
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
    """Patch storage calls that bypass the dispatcher: `copy.deepcopy` clones storages, FSDP2 resizes them.

    A clone of a meta storage is also one; a resized storage keeps its address and reports another size.
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
    """Run compiled code eagerly: the operators that the compiler would fuse are unknown."""

    def compile_(model: Any = None, **options: Any) -> Any:
        dry.guesses.add("torch.compile: counted as eager execution; fused operators may need less")
        return model if model is not None else lambda given: given

    patches.replace(torch, "compile", compile_)
    if "torch._dynamo" in sys.modules:
        stance = torch.compiler.set_stance("force_eager")
        patches.on_undo(stance.__exit__, None, None, None)


def _patch_profilers(patches: Patches) -> None:
    prepare: Any = profiler.profile._prepare_trace
    machine().may_try(None)
    patches.on_undo(machine().may_try, None)

    def prepare_theirs(theirs: Any) -> None:
        machine().may_try(False)
        prepare(theirs)

    patches.replace(profiler.profile, "_prepare_trace", prepare_theirs)


def _patch_files(patches: Patches, dry: Dry) -> None:
    """Save nothing, since it would overwrite weights with zeros; memory-map files that are loaded.

    A file that was not written is not renamed either, as a script does that saves in one piece.
    """
    load: Any = torch.load
    unwritten = set[Path]()

    def save(obj: Any, f: Any, *_: Any, **__: Any) -> None:
        dry.guesses.add("torch.save: nothing was written")
        if isinstance(f, (str, os.PathLike)):
            unwritten.add(Path(f).absolute())

    def renamed(original: Any) -> Any:
        @functools.wraps(original)
        def rename(source: Any, target: Any, **options: Any) -> None:
            if isinstance(source, (str, os.PathLike)) and Path(source).absolute() in unwritten:
                unwritten.add(Path(target).absolute())
            else:
                original(source, target, **options)

        return rename

    def load_mapped(file: Any, *args: Any, **options: Any) -> Any:
        if isinstance(file, (str, os.PathLike)) and "mmap" not in options:
            with contextlib.suppress(RuntimeError, ValueError):
                return load(file, *args, **options, mmap=True)
        return load(file, *args, **options)

    patches.replace(torch, "save", save)
    for name in ("replace", "rename"):
        patches.replace(os, name, renamed(getattr(os, name)))
    patches.replace(torch, "load", load_mapped)


def _patch_finite(patches: Patches, dry: Dry) -> None:
    """Take an unknown number as finite: a script that asks would skip the step."""

    def finding(original: Any) -> Any:
        @functools.wraps(original)
        def isfinite(given: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = original(given)
            if given.numel() != 1 or dry.knows(found):
                return found
            return torch.ones(given.shape, dtype=torch.bool, device=given.device)

        return isfinite

    for owner in (torch, torch.Tensor):
        patches.replace(owner, "isfinite", finding(owner.isfinite))


def _patch_tolerance(patches: Patches, dry: Dry) -> None:
    """Run LBFGS to its last iteration: it stops by losses, which a dry run does not compute."""
    own: dict[torch.optim.Optimizer, float] = {}

    def begins(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            dry.guesses.add(
                "LBFGS: counted with all iterations of a step, none of them without curvature"
            )
            (group,) = optimizer.param_groups
            own[optimizer], group["tolerance_change"] = group["tolerance_change"], -1.0

    def ends(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer in own:
            optimizer.param_groups[0]["tolerance_change"] = own.pop(optimizer)

    patches.on_undo(register_optimizer_step_pre_hook(begins).remove)
    patches.on_undo(register_optimizer_step_post_hook(ends).remove)


_ARGUMENTS = (
    *("batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn"),
    *("pin_memory", "drop_last", "timeout", "worker_init_fn", "multiprocessing_context"),
)
"""A DataLoader's positional arguments after its data set."""
_OF_WORKERS = ("persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout")


def _patch_loaders(
    patches: Patches,
    wanted: int | None,
    *,
    here: bool,
    seen: Callable[[int], None] = lambda _: None,
) -> None:
    """Make batching loaders use batches of `wanted` samples; raise `ValueError` if a data set has fewer.

    `here`: load in this process. `seen` gets each loader's own batch size.
    """
    original: Any = DataLoader.__init__

    @functools.wraps(original)
    def make(loader: Any, dataset: Any, *args: Any, **options: Any) -> None:
        options = {**dict(zip(_ARGUMENTS, args, strict=False)), **options}
        if here:
            options["num_workers"] = 0
            for name in _OF_WORKERS:
                options.pop(name, None)
        size = options.get("batch_size", 1)
        if size is not None and size > 1 and options.get("batch_sampler") is None:
            seen(size)
            options["batch_size"] = size = wanted or size
            if isinstance(dataset, Sized) and len(dataset) < size:
                raise ValueError(f"the data set has {len(dataset)} samples, fewer than {size}")
        original(loader, dataset, **options)

    patches.replace(DataLoader, "__init__", make)


@contextlib.contextmanager
def sized_loaders(wanted: int | None) -> Iterator[None]:
    """Override the batch size of loaders created inside the block; None leaves it alone."""
    patches = Patches()
    if wanted is not None:
        _patch_loaders(patches, wanted, here=False)
    try:
        yield
    finally:
        patches.undo()
