"""What one batch takes, in parts: the data set is asked apart from its loader."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import _utils
from torch.utils.data.dataloader import _DatasetKind

from torchtrim.core.clock import CLOCK, Clock
from torchtrim.data.packing import narrowed, tensors_in
from torchtrim.records.loader import BatchParts

_MOST_SECONDS = 2.0  # Said in parts_of. Arbitrary; as long as a person waits for one figure.
_LEAST = 2  # The first sample opens files and fills caches, the second shows that it is done.


class BatchSource(NamedTuple):
    """Where a loader's batches come from; a loader's iterator has the same attributes as the loader."""

    dataset: Any
    indices: Any
    collate: Any
    grouped: bool
    mapped: bool

    @classmethod
    def of(cls, loader: Any) -> BatchSource:
        """That of a `DataLoader`, or of an iterator over one."""
        collate = getattr(loader, "_collate_fn", None) or loader.collate_fn
        dataset = getattr(loader, "_dataset", None) or loader.dataset
        mapped = loader._dataset_kind == _DatasetKind.Map
        return cls(dataset, loader._index_sampler, collate, loader._auto_collation, mapped)


class _Read(NamedTuple):
    """Samples of a batch with the seconds of each: all, and those in which the processor worked."""

    samples: Any
    taken: int
    wanted: int
    seconds: list[float]
    busy: list[float]


def parts_of(source: BatchSource, clock: Clock = CLOCK) -> BatchParts | None:
    """Read one batch here, and time it; None where the source has none or cannot be read here.

    Random numbers are drawn as the data set draws them: the caller keeps the generators' states.
    Of a large batch as many samples are read as two seconds allow.
    """
    with contextlib.suppress(Exception):
        return _parts(source, clock)
    return None


def _parts(source: BatchSource, clock: Clock) -> BatchParts:
    index = next(iter(source.indices))
    _read(source, index, clock, _LEAST)
    read = _read(source, index, clock, None)
    scale = read.wanted / max(read.taken, 1)
    begin = clock.now()
    batch = source.collate(read.samples)
    collating = (clock.now() - begin) * scale
    seconds = sum(read.seconds) * scale
    decoding = min(sum(read.busy) * scale, seconds)
    found = narrowed(batch)
    mean = statistics.fmean(read.seconds)
    return BatchParts(
        samples=read.wanted,
        bytes=int(found.bytes * scale),
        reading=seconds - decoding,
        decoding=decoding,
        collating=collating,
        handing=_handing(batch, clock) * scale,
        whole=_whole(source, index, batch, clock) if scale == 1 else None,
        sample_spread=statistics.pstdev(read.seconds) / mean if mean else 0.0,
        narrow_bytes=int(found.narrow_bytes * scale),
        narrow=found.types,
    )


def _read(source: BatchSource, index: Any, clock: Clock, most: int | None) -> _Read:
    if not source.grouped:
        sample, seconds, busy = _timed(source, index, clock)
        return _Read(sample, 1, 1, [seconds], [busy])
    numbers = list(index)
    steps = iter(source.dataset) if not source.mapped else None
    samples: list[Any] = []
    times: list[float] = []
    works: list[float] = []
    for number in numbers[:most]:
        sample, took, worked = _timed(source, number, clock, steps)
        samples.append(sample)
        times.append(took)
        works.append(worked)
        if sum(times) > _MOST_SECONDS:
            break
    return _Read(samples, len(samples), len(numbers), times, works)


def _timed(
    source: BatchSource, number: Any, clock: Clock, steps: Iterator[Any] | None = None
) -> tuple[Any, float, float]:
    begin, worked = clock.now(), clock.busy()
    if source.mapped:
        sample = source.dataset[number]
    else:
        sample = next(steps if steps is not None else iter(source.dataset))
    return sample, clock.now() - begin, clock.busy() - worked


def _handing(batch: Any, clock: Clock) -> float:
    """What it takes to go through a batch's bytes once, as a process does with memory that it maps."""
    begin = clock.now()
    for tensor in tensors_in(batch):
        tensor.clone()
    return clock.now() - begin


def takes_batches(source: BatchSource) -> bool:
    """Whether the data set may be asked for all samples of a batch at once, and nothing be collated."""
    plain = source.collate is _utils.collate.default_collate
    return source.mapped and source.grouped and plain


def _whole(source: BatchSource, index: Any, batch: Any, clock: Clock) -> float | None:
    """Seconds of the data set asked for the batch at once, None where that gives anything else."""
    if not takes_batches(source):
        return None
    with contextlib.suppress(Exception):
        begin = clock.now()
        found = source.dataset[list(index)]
        seconds = clock.now() - begin
        return seconds if _same(found, batch) else None
    return None


def _same(found: Any, batch: Any) -> bool:
    """Whether two batches are equal bit for bit; a tuple is as good as the list that collating makes."""
    if isinstance(batch, torch.Tensor):
        return (
            isinstance(found, torch.Tensor)
            and found.dtype == batch.dtype
            and torch.equal(found, batch)
        )
    if isinstance(batch, (list, tuple)) and isinstance(found, (list, tuple)):
        return len(found) == len(batch) and all(map(_same, found, batch))
    if isinstance(batch, dict) and isinstance(found, dict):
        return found.keys() == batch.keys() and all(_same(found[key], batch[key]) for key in batch)
    return False
