"""A model of PyTorch's CUDA caching allocator: from tensor allocations to bytes requested from the device.

Sizes are rounded up to 512 bytes. Requests up to 1 MiB are served from segments of 2 MiB, those under 10 MiB
from segments of 20 MiB; larger ones get their own segments, in steps of 2 MiB. The allocator takes the
smallest free block that fits and splits off the rest if it is worth keeping. Free neighbours are merged.
Segments are kept until the cache is emptied.

Source: pytorch/pytorch, c10/cuda/CUDACachingAllocator.cpp (v2.13.0), without its options
(`expandable_segments`, `max_split_size_mb`, `roundup_power2_divisions`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

_MIB = 2**20
_UNIT = 512  # KMinBlockSize of CUDACachingAllocator.cpp.
_SMALL = _MIB
_SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_OWN_SEGMENT = 10 * _MIB
_STEP = 2 * _MIB


@dataclass(slots=True, eq=False)
class _CachedBlock:
    pool: _Pool
    address: int
    size: int
    free: bool = False
    before: _CachedBlock | None = None
    after: _CachedBlock | None = None


@dataclass(slots=True, eq=False)
class _Pool:
    """Free blocks of one stream, either small or large, sorted by size and address, which is unique."""

    small: bool
    blocks: list[tuple[int, int, _CachedBlock]] = field(default_factory=list)

    def take(self, size: int) -> _CachedBlock | None:
        at = bisect_left(self.blocks, (size,))
        return self.blocks.pop(at)[2] if at < len(self.blocks) else None

    def put(self, block: _CachedBlock) -> None:
        insort(self.blocks, (block.size, block.address, block))

    def remove(self, block: _CachedBlock) -> None:
        del self.blocks[bisect_left(self.blocks, (block.size, block.address))]


class CachingAllocator:
    """Simulated allocator with `allocated` (rounded) and `reserved` (segment) bytes, and the peak of each.

    `mallocs - frees` is the number of blocks in use, `segments - released` the number of segments held.
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self.mallocs = self.frees = self.segments = self.released = 0
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._blocks: dict[int, _CachedBlock] = {}
        self._handles = 0
        self._address = 0

    def malloc(self, size: int, stream: int = 0) -> int:
        """Allocate `size` bytes for a stream and return a handle for `free`."""
        self._handles += 1
        if size <= 0:
            return self._handles
        size = rounded(size)
        small = size <= _SMALL
        pool = self._pools.setdefault((stream, small), _Pool(small))
        block = pool.take(size) or self._segment(pool, size)
        self._split(block, size)
        block.free = False
        self._blocks[self._handles] = block
        self.mallocs += 1
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return self._handles

    def free(self, handle: int) -> None:
        """Free the block of a handle, unless it has zero bytes."""
        if (block := self._blocks.pop(handle, None)) is None:
            return
        self.frees += 1
        self.allocated -= block.size
        block.free = True
        block.pool.put(self._merged(block))

    def empty_cache(self) -> None:
        """Release the segments that are entirely free."""
        for pool in self._pools.values():
            segments = [block for _, _, block in pool.blocks if _is_segment(block)]
            self.released += len(segments)
            self.reserved -= sum(block.size for block in segments)
            pool.blocks = [free for free in pool.blocks if not _is_segment(free[2])]

    def split_bytes(self) -> int:
        """Return the free bytes in segments that are partly in use."""
        free = (free for pool in self._pools.values() for free in pool.blocks)
        return sum(size for size, _, block in free if not _is_segment(block))

    def reset_peaks(self) -> None:
        """Reset both peaks to the current values."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def _segment(self, pool: _Pool, size: int) -> _CachedBlock:
        if size <= _SMALL:
            segment = _SMALL_SEGMENT
        else:
            segment = _LARGE_SEGMENT if size < _OWN_SEGMENT else -(-size // _STEP) * _STEP
        block = _CachedBlock(pool, self._address, segment)
        self._address += block.size
        self.segments += 1
        self.reserved += block.size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    def _split(self, block: _CachedBlock, size: int) -> None:
        """Split off the part of the block beyond `size` if it is worth keeping."""
        rest = block.size - size
        if rest < _UNIT if block.pool.small else rest <= _SMALL:
            return
        other = _CachedBlock(block.pool, block.address + size, rest)
        other.free = True
        other.before, other.after = block, block.after
        if block.after is not None:
            block.after.before = other
        block.after = other
        block.size = size
        block.pool.put(other)

    def _merged(self, block: _CachedBlock) -> _CachedBlock:
        after, before = block.after, block.before
        if after is not None and after.free:
            block.pool.remove(after)
            _join(block, after)
        if before is not None and before.free:
            block.pool.remove(before)
            _join(before, block)
            return before
        return block


def rounded(size: int) -> int:
    """Return the bytes that the allocator uses for a request."""
    return -(-size // _UNIT) * _UNIT


def _join(block: _CachedBlock, after: _CachedBlock) -> None:
    block.size += after.size
    block.after = after.after
    if after.after is not None:
        after.after.before = block


def _is_segment(block: _CachedBlock) -> bool:
    return block.before is None and block.after is None
