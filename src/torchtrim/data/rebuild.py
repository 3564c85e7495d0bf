"""Copies of a loader with other settings, which give the same batches in the same order."""

from __future__ import annotations

import warnings
from typing import Any

from torch.utils.data import DataLoader

from torchtrim.data.parts import BatchSource
from torchtrim.errors import UsageError
from torchtrim.records.loader import LoaderSettings


def settings_of(loader: Any) -> LoaderSettings:
    """Return the settings of a `DataLoader` or of an iterator over one."""
    prefix = "_" if hasattr(loader, "_num_workers") else ""
    workers, prefetch, pinned, persistent = (
        getattr(loader, prefix + name, None)
        for name in ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
    )
    return LoaderSettings(
        workers=int(workers or 0),
        prefetch=int(prefetch or 2),
        pinned=bool(pinned),
        persistent=bool(persistent),
    )


def check_loader(loader: Any) -> None:
    """Raise `UsageError` unless `loader` is a `DataLoader`."""
    if not isinstance(loader, DataLoader):
        name = type(loader).__name__
        raise UsageError(f"expected a DataLoader, got {name}. Pass the DataLoader that it wraps.")


def keywords_of(settings: LoaderSettings) -> dict[str, Any]:
    """Return the `DataLoader` arguments for these settings, with worker options only if there are workers."""
    found: dict[str, Any] = {"num_workers": settings.workers}
    if settings.workers:
        found["persistent_workers"] = settings.persistent
        found["prefetch_factor"] = settings.prefetch
    if settings.pinned:
        found["pin_memory"] = True
    return found


def rebuilt(loader: Any, settings: LoaderSettings) -> DataLoader[Any]:
    """Return a `DataLoader` over the same data set and sampler with these settings. Raises `UsageError`.

    Torch's warnings, such as too many workers, are suppressed: the original loader already gave them.
    """
    check_loader(loader)
    given: dict[str, Any] = {
        "collate_fn": None if settings.whole else loader.collate_fn,
        "generator": loader.generator,
        "worker_init_fn": loader.worker_init_fn if settings.workers else None,
        **keywords_of(settings),
    }
    if settings.workers and loader.num_workers:
        given["timeout"] = loader.timeout
        given["multiprocessing_context"] = loader.multiprocessing_context
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return DataLoader(loader.dataset, **_batches(loader, settings), **given)


def end_workers(loader: Any) -> None:
    """Shut down the persistent workers of a loader."""
    kept = getattr(loader, "_iterator", None)
    if kept is not None and hasattr(kept, "_shutdown_workers"):
        kept._shutdown_workers()
        loader._iterator = None


def _batches(loader: Any, settings: LoaderSettings) -> dict[str, Any]:
    """Return the batching arguments. A batch fetched as a whole is one sample of a batch sampler."""
    source = BatchSource.of(loader)
    if settings.whole and source.grouped and source.mapped:
        return {"batch_size": None, "sampler": loader.batch_sampler}
    if loader.batch_sampler is not None and source.mapped:
        return {"batch_sampler": loader.batch_sampler}
    if source.mapped:
        return {"batch_size": None, "sampler": loader.sampler}
    dropping = {"drop_last": loader.drop_last} if loader.batch_size is not None else {}
    return {"batch_size": loader.batch_size, **dropping}


def written(settings: LoaderSettings, before: LoaderSettings) -> str:
    """Return the changed arguments as source: `num_workers=2, persistent_workers=True`."""
    new, old = keywords_of(settings), keywords_of(before)
    changed = [f"{name}={value}" for name, value in new.items() if old.get(name) != value]
    if settings.whole and not before.whole:
        changed.append("sampler=BatchSampler(...), batch_size=None")
    dropped = [f"no {name}" for name in old if name not in new]
    return ", ".join([*changed, *dropped]) or "nothing"
