"""Has loaders that a program makes give batches of another size."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sized
from typing import Any

from torch.utils.data import DataLoader

from torchtrim.dispatch.patches import Patches

_ARGUMENTS = (
    *("batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn"),
    *("pin_memory", "drop_last", "timeout", "worker_init_fn", "multiprocessing_context"),
)
"""Arguments of a loader after its data set, in order."""
_OF_WORKERS = ("persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout")


def patch_loaders(
    patches: Patches, wanted: int | None, *, here: bool, seen: Callable[[int], None]
) -> None:
    """Loaders that batch give `wanted` samples, if not what they would. `here`: they load in this process.

    `seen` hears what they would give. One whose data set has fewer samples raises `ValueError`.
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
    """For a while loaders that are made give batches of that size; with None as they would."""
    patches = Patches()
    if wanted is not None:
        patch_loaders(patches, wanted, here=False, seen=lambda _: None)
    try:
        yield
    finally:
        patches.undo()
