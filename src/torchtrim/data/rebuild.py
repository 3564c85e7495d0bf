"""The same loader with other settings: the same batches, in the same order."""

from __future__ import annotations

import warnings
from typing import Any

from torch.utils.data import DataLoader

from torchtrim.data.parts import BatchSource
from torchtrim.errors import UsageError
from torchtrim.records.loader import LoaderSettings


def settings_of(loader: Any) -> LoaderSettings:
    """How a `DataLoader`, or an iterator over one, is set."""
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
    """Raises `UsageError` for what is no `DataLoader`."""
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"a {type(loader).__name__} is no torch.utils.data.DataLoader, and how it reads ahead cannot be "
            "set from outside. Give the loader that it goes over."
        )


def keywords_of(settings: LoaderSettings) -> dict[str, Any]:
    """The arguments of `DataLoader` for these settings; those of workers only where there are some."""
    found: dict[str, Any] = {"num_workers": settings.workers}
    if settings.workers:
        found["persistent_workers"] = settings.persistent
        found["prefetch_factor"] = settings.prefetch
    if settings.pinned:
        found["pin_memory"] = True
    return found


def rebuilt(loader: Any, settings: LoaderSettings) -> DataLoader[Any]:
    """A `DataLoader` over the same data set and sampler with these settings. Raises `UsageError`.

    What torch warns of, such as more workers than cores, it has warned of before.
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
    """End the workers that a loader keeps between epochs."""
    kept = getattr(loader, "_iterator", None)
    if kept is not None and hasattr(kept, "_shutdown_workers"):
        kept._shutdown_workers()
        loader._iterator = None


def _batches(loader: Any, settings: LoaderSettings) -> dict[str, Any]:
    """What groups the samples. A batch that is fetched as a whole is one sample of a sampler of batches."""
    source = BatchSource.of(loader)
    if settings.whole and source.grouped and source.mapped:
        return {"batch_size": None, "sampler": loader.batch_sampler}
    if loader.batch_sampler is not None and source.mapped:
        return {"batch_sampler": loader.batch_sampler}
    given = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if not source.mapped:
        return given if loader.batch_size is not None else {"batch_size": None}
    return {"batch_size": None, "sampler": loader.sampler}


def written(settings: LoaderSettings, before: LoaderSettings) -> str:
    """The arguments to change, as a person writes them: `num_workers=2, persistent_workers=True`."""
    new, old = keywords_of(settings), keywords_of(before)
    changed = [f"{name}={value}" for name, value in new.items() if old.get(name) != value]
    gone = [f"no {name}" for name in old if name not in new]
    whole = (
        ["sampler=BatchSampler(...), batch_size=None"]
        if settings.whole and not before.whole
        else []
    )
    return ", ".join([*changed, *whole, *gone]) or "nothing"
