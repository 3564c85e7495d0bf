"""Timing of one batch in parts, by calling the data set without its loader."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import _utils
from torch.utils.data.dataloader import _DatasetKind

from torchtrim.core.clock import CLOCK, Clock
from torchtrim.records.loader import BatchParts


def cores_here() -> int:
    """Return the number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_bytes() -> int:
    """Return the free bytes for batches: the machine's or its shared memory's, the smaller; 0 if unknown."""
    free = []
    with contextlib.suppress(OSError, ValueError):
        text = Path("/proc/meminfo").read_text()
        (line,) = (line for line in text.splitlines() if line.startswith("MemAvailable:"))
        free.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError):
        shared = os.statvfs("/dev/shm")
        free.append(shared.f_bavail * shared.f_frsize)
    return min(free, default=0)


_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32)
_HALVES = (torch.float16, torch.bfloat16)
_LEVELS = 255.0  # The highest uint8: images are scaled by it to 0..1.
_FEW = 4096  # Arbitrary; most tensors that cannot be packed show it in their first values.
_MOST = 1 << 22  # Arbitrary; four million values take some milliseconds to check.


class Narrow(NamedTuple):
    """Byte counts and types of a batch's tensors, before and after narrowing."""

    bytes: int
    narrow_bytes: int
    types: tuple[str, ...]


def narrowed(batch: Any) -> Narrow:
    """Return the size of a batch's tensors, in their own and in the narrowest exact types."""
    tensors = list(tensors_in(batch))
    kinds = [(tensor.dtype, narrowest(tensor)) for tensor in tensors]
    types = [f"{own} -> {kind}".replace("torch.", "") for own, kind in kinds if kind != own]
    return Narrow(
        sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        sum(one.numel() * kind.itemsize for one, (_, kind) in zip(tensors, kinds, strict=True)),
        tuple(dict.fromkeys(types)),
    )


def tensors_in(batch: Any) -> Iterable[torch.Tensor]:
    """Return the dense tensors of a batch."""
    tensors = (one for one in tree_leaves(batch) if isinstance(one, torch.Tensor))
    return (tensor for tensor in tensors if tensor.layout == torch.strided)


def narrowest(tensor: torch.Tensor) -> torch.dtype:
    """Return the narrowest type that restores the values bit for bit, or the tensor's own.

    `uint8` also holds floats that are whole numbers up to 255, or those divided by 255, as `ToTensor` makes
    them. The first four million values decide.
    """
    packed = packed_in(tensor.detach().reshape(-1)[:_MOST])
    return packed.values.dtype if packed is not None else tensor.dtype


class Packed(NamedTuple):
    """Values in a narrower type. The originals, of type `dtype`, are the values divided by `scale`."""

    values: torch.Tensor
    dtype: torch.dtype
    scale: float = 1.0

    def widened(self) -> torch.Tensor:
        """Return the original tensor, bit for bit, on the device of the values.

        Divides by a tensor: CUDA would multiply by the inverse of a number.
        """
        wide = self.values.to(self.dtype)
        if self.scale == 1.0:
            return wide
        return wide.div_(torch.full((), self.scale, dtype=self.dtype, device=wide.device))


def packed_in(tensor: torch.Tensor) -> Packed | None:
    """Return the tensor in the narrowest exact type, or None if there is none."""
    if not tensor.numel() or tensor.dtype == torch.bool or tensor.dtype.is_complex:
        return None
    ways = _float_ways if tensor.dtype.is_floating_point else _whole_ways
    tries = (_if_exact(tensor, kind, scale) for kind, scale in ways(tensor))
    return next((packed for packed in tries if packed is not None), None)


def _float_ways(tensor: torch.Tensor) -> Iterator[tuple[torch.dtype, float]]:
    narrower = (*_HALVES, torch.float32)
    yield torch.uint8, 1.0
    yield torch.uint8, _LEVELS
    yield from ((kind, 1.0) for kind in narrower if kind.itemsize < tensor.dtype.itemsize)


def _whole_ways(tensor: torch.Tensor) -> Iterator[tuple[torch.dtype, float]]:
    low, high = int(tensor.min()), int(tensor.max())
    for kind in _WHOLE:
        limits = torch.iinfo(kind)
        if limits.min <= low and high <= limits.max and kind.itemsize < tensor.dtype.itemsize:
            yield kind, 1.0


def _if_exact(tensor: torch.Tensor, kind: torch.dtype, scale: float) -> Packed | None:
    """Narrow the tensor if every value survives. A few values are tried first."""
    if tensor.numel() > _FEW and _if_exact(tensor.reshape(-1)[:_FEW], kind, scale) is None:
        return None
    values = tensor
    if tensor.dtype.is_floating_point and not kind.is_floating_point:
        values = (tensor * scale).round_().clamp_(0, _LEVELS).nan_to_num_()
    packed = Packed(values.to(kind), tensor.dtype, scale)
    return packed if _same_bits(packed.widened(), tensor) else None


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not torch.equal(one, other):
        return False
    return not one.dtype.is_floating_point or torch.equal(one.signbit(), other.signbit())


_MOST_SECONDS = 2.0  # As parts_of says. Arbitrary; as long as a person waits for one figure.
_LEAST = 2  # The first sample opens files and fills caches, the second shows that it is done.


class BatchSource(NamedTuple):
    """Source of a loader's batches. A loader's iterator has the same attributes as the loader."""

    dataset: Any
    indices: Any
    collate: Any
    grouped: bool
    mapped: bool

    @classmethod
    def of(cls, loader: Any) -> BatchSource:
        """Return the source of a `DataLoader`, or of an iterator over one."""
        collate = getattr(loader, "_collate_fn", None) or loader.collate_fn
        dataset = getattr(loader, "_dataset", None) or loader.dataset
        mapped = loader._dataset_kind == _DatasetKind.Map
        return cls(dataset, loader._index_sampler, collate, loader._auto_collation, mapped)


class _Read(NamedTuple):
    """Samples of a batch with the wall and CPU seconds of each."""

    samples: Any
    taken: int
    wanted: int
    seconds: list[float]
    busy: list[float]


def parts_of(source: BatchSource, clock: Clock = CLOCK) -> BatchParts | None:
    """Read one batch in this process and time it. Return None if there is none, or if it cannot be read here.

    The data set draws random numbers as usual; the caller saves the generators' states. Large batches are
    read for about two seconds only.
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
    sizes = narrowed(batch)
    mean = statistics.fmean(read.seconds)
    begin = clock.now()
    for tensor in tensors_in(batch):
        tensor.clone()  # A process passes a batch on with one copy, in shared memory.
    handing = (clock.now() - begin) * scale
    return BatchParts(
        samples=read.wanted,
        bytes=int(sizes.bytes * scale),
        reading=seconds - decoding,
        decoding=decoding,
        collating=collating,
        handing=handing,
        whole=_whole(source, index, batch, clock) if scale == 1 else None,
        sample_spread=statistics.pstdev(read.seconds) / mean if mean else 0.0,
        narrow_bytes=int(sizes.narrow_bytes * scale),
        narrow=sizes.types,
    )


def _read(source: BatchSource, index: Any, clock: Clock, most: int | None) -> _Read:
    numbers = list(index) if source.grouped else [index]
    steps = None if source.mapped else iter(source.dataset)
    samples: list[Any] = []
    seconds: list[float] = []
    busy: list[float] = []
    for number in numbers[:most]:
        begin, worked = clock.now(), clock.busy()
        samples.append(source.dataset[number] if steps is None else next(steps))
        seconds.append(clock.now() - begin)
        busy.append(clock.busy() - worked)
        if sum(seconds) > _MOST_SECONDS:
            break
    whole = samples if source.grouped else samples[0]
    return _Read(whole, len(samples), len(numbers), seconds, busy)


def _whole(source: BatchSource, index: Any, batch: Any, clock: Clock) -> float | None:
    """Return the seconds to fetch the batch in one call, without collating, if the result is the same."""
    plain = source.collate is _utils.collate.default_collate
    if not (source.mapped and source.grouped and plain):
        return None
    with contextlib.suppress(Exception):
        begin = clock.now()
        found = source.dataset[list(index)]
        seconds = clock.now() - begin
        return seconds if _same(found, batch) else None
    return None


def _same(found: Any, batch: Any) -> bool:
    if isinstance(batch, torch.Tensor) and isinstance(found, torch.Tensor):
        return found.dtype == batch.dtype and torch.equal(found, batch)
    if isinstance(batch, (list, tuple)) and isinstance(found, (list, tuple)):
        return len(found) == len(batch) and all(map(_same, found, batch))
    if isinstance(batch, dict) and isinstance(found, dict):
        return found.keys() == batch.keys() and all(_same(found[key], batch[key]) for key in batch)
    return False
