"""A model of PyTorch's CUDA caching allocator: from tensor allocations to bytes requested from the device.

Sizes are rounded up to 512 bytes. Requests up to 1 MiB are served from segments of 2 MiB, those under 10 MiB
from segments of 20 MiB; larger ones get their own segments, in steps of 2 MiB. The allocator takes the
smallest free block that fits and splits off the rest if it is worth keeping. Free neighbours are merged.
Segments are kept until the cache is emptied. Expandable segments are ranges of addresses to which pages of
2 MiB, or 20 MiB for large requests, are mapped as they are needed.

Source: pytorch/pytorch, c10/cuda/CUDACachingAllocator.cpp (v2.13.0). `AllocatorSettings` has its settings.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torchtrim.memory.settings import LARGE_SEGMENT, UNIT, AllocatorSettings

_MIB = 2**20
SMALL = _MIB  # kSmallSize: the largest request of the small pool.
SMALL_SEGMENT = 2 * _MIB  # kSmallBuffer.
_OWN_SEGMENT = 10 * _MIB  # kMinLargeAlloc.
_STEP = 2 * _MIB  # kRoundLarge.
_PAGES = 2**19  # Of one range; no device has as much memory.


class DeviceFull(Exception):
    """The device has not enough memory left, not even without the cache. `size`: bytes requested."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A block of a segment, between its neighbours. `range_start`: where its expandable range begins."""

    pool: BlockPool
    address: int
    size: int
    free: bool = False
    mapped: bool = True
    range_start: int | None = None
    inserted: int = 0
    before: CachedBlock | None = None
    after: CachedBlock | None = None

    @property
    def whole(self) -> bool:
        """True for a segment of its own."""
        return self.before is None and self.after is None

    def expandable_size(self) -> int:
        """Return the bytes that it can grow to."""
        after = self.after
        return self.size + (after.size if after is not None and not after.mapped else 0)


@dataclass(slots=True, eq=False)
class BlockPool:
    """Free blocks of one stream, either small or large, sorted by size and address, which is unique."""

    small: bool
    blocks: list[tuple[int, int, CachedBlock]] = field(default_factory=list)
    unmapped: list[tuple[int, CachedBlock]] = field(default_factory=list)
    searches: int = 0

    @property
    def page(self) -> int:
        """The bytes that an expandable segment maps at once."""
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT

    def take(self, size: int, settings: AllocatorSettings) -> CachedBlock | None:
        """Take out the best free block for `size` bytes."""
        self.searches += 1
        at = bisect_left(self.blocks, (size,))
        if at < len(self.blocks) and self.blocks[at][2].range_start is not None:
            at = self._in_range(at, settings)
        if at == len(self.blocks):
            return None
        most = settings.max_split_size
        found = self.blocks[at][0]
        if most is not None and size < most <= found:
            return None
        if most is not None and most <= size and found >= size + settings.max_non_split_rounding:
            return None
        return self.blocks.pop(at)[2]

    def _in_range(self, at: int, settings: AllocatorSettings) -> int:
        """Return the index of the block that grows least, or of the first outside of a range."""
        blocks = self.blocks
        if not settings.expandable_segments:
            while at < len(blocks) and blocks[at][2].range_start is not None:
                at += 1
            return at
        while (
            at + 1 < len(blocks)
            and blocks[at][2].range_start is not None
            and blocks[at + 1][2].expandable_size() < blocks[at][2].expandable_size()
        ):
            at += 1
        return at

    def put(self, block: CachedBlock) -> None:
        """Put a free block in."""
        block.inserted = self.searches
        insort(self.blocks, (block.size, block.address, block))

    def remove(self, block: CachedBlock) -> None:
        """Take a free or unmapped block out."""
        if block.mapped:
            del self.blocks[bisect_left(self.blocks, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def put_unmapped(self, block: CachedBlock) -> None:
        """Put in a part of a range that has no memory."""
        insort(self.unmapped, (block.address, block))


class CachingAllocator:
    """Simulated allocator with `allocated` (rounded) and `reserved` (segment) bytes, and the peak of each.

    `mallocs - frees` is the number of blocks in use, `segments - released` the number of segments held,
    `mapped` how often pages were mapped. `capacity`: the bytes that it may reserve; past them it releases its
    cache as PyTorch does, counts a retry, and raises `DeviceFull`. `place`: returns the address of a new
    segment, or of a new range, of so many bytes.
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        capacity: int | None = None,
        place: Callable[[int], int] | None = None,
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.capacity = capacity
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self.mallocs = self.frees = self.segments = self.released = self.mapped = self.retries = 0
        self._pools: dict[tuple[int, int, bool], BlockPool] = {}
        self._blocks: dict[int, CachedBlock] = {}
        self._handles = 0
        self._address = 0
        self._place = place or self._next_address

    def malloc(self, size: int, stream: int = 0, private: int = 0) -> int:
        """Allocate `size` bytes for a stream, of a private pool, and return a handle for `free`.

        Raises `DeviceFull` where `capacity` does not suffice.
        """
        if size <= 0:
            self._handles += 1
            return self._handles
        return self.adopt(self._found(size, stream, private))

    def keep(self, size: int) -> None:
        """Reserve a block for good that counts as neither allocated nor requested: a library's workspace."""
        self._found(size, 0, 0).free = False

    def _found(self, size: int, stream: int, private: int) -> CachedBlock:
        size = self.settings.rounded(size)
        pool = self.pool(stream, size <= SMALL, private)
        block = pool.take(size, self.settings) or self._from_device(pool, size)
        if self._is_split(block, size):
            self._split(block, size)
        return block

    def adopt(self, block: CachedBlock) -> int:
        """Count a block as in use and return its handle."""
        self._handles += 1
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
        block.pool.put(_merged(block))

    def address(self, handle: int) -> int | None:
        """Return where the block of a handle lies, or None if it has zero bytes."""
        block = self._blocks.get(handle)
        return None if block is None else block.address

    def pool(self, stream: int, small: bool, private: int = 0) -> BlockPool:
        """Return the pool of a stream."""
        key = (private, stream, small)
        if (pool := self._pools.get(key)) is None:
            pool = self._pools[key] = BlockPool(small)
        return pool

    def empty_cache(self) -> None:
        """Release the segments that are entirely free, and the pages of ranges that are."""
        for pool in self._pools.values():
            for block in [block for _, _, block in pool.blocks]:
                if block.range_start is not None:
                    self._unmap(block)
                elif block.whole:
                    self._release(block)

    def release(self, address: int) -> bool:
        """Release the segment at an address. Returns False where there is none that is entirely free."""
        for block in self._free_blocks():
            if block.address == address and block.whole and block.range_start is None:
                self._release(block)
                return True
        return False

    def split_bytes(self) -> int:
        """Return the free bytes in segments that are partly in use."""
        return sum(self.split_sizes())

    def split_sizes(self) -> list[int]:
        """Return the bytes of each free block in a segment that is partly in use. Ranges have none."""
        return [
            block.size
            for block in self._free_blocks()
            if not block.whole and block.range_start is None
        ]

    def free_sizes(self) -> list[int]:
        """Return the bytes of each free block."""
        return [block.size for block in self._free_blocks()]

    def reset_peaks(self) -> None:
        """Reset both peaks to the current values."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def extend(self, block: CachedBlock) -> None:
        """Let a range grow after a block, its last one."""
        size = _PAGES * block.pool.page
        rest = CachedBlock(
            block.pool, block.address + block.size, size, range_start=block.range_start
        )
        rest.free, rest.mapped = True, False
        rest.before, block.after = block, rest
        block.pool.put_unmapped(rest)

    def hold(self, size: int) -> None:
        """Count bytes as reserved from the device."""
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _free_blocks(self) -> Iterator[CachedBlock]:
        return (block for pool in self._pools.values() for _, _, block in pool.blocks)

    def _next_address(self, size: int) -> int:
        self._address += size
        return self._address - size

    def _from_device(self, pool: BlockPool, size: int) -> CachedBlock:
        """Return a block of new memory, after releasing what is cached if that is needed."""
        self._collect()
        new = self._range_block if self.settings.expandable_segments else self._segment
        block = new(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = new(pool, size)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = new(pool, size)
        if block is None:
            raise DeviceFull(size)
        return block

    def _fits(self, size: int) -> bool:
        return self.capacity is None or self.reserved + size <= self.capacity

    def _segment(self, pool: BlockPool, size: int) -> CachedBlock | None:
        if size <= SMALL:
            segment = SMALL_SEGMENT
        else:
            segment = LARGE_SEGMENT if size < _OWN_SEGMENT else -(-size // _STEP) * _STEP
        if not self._fits(segment):
            return None
        self.segments += 1
        self.hold(segment)
        return CachedBlock(pool, self._place(segment), segment)

    def _release(self, block: CachedBlock) -> None:
        block.pool.remove(block)
        self.released += 1
        self.reserved -= block.size

    def _collect(self) -> None:
        """Release old segments of the large pools once a share of the capacity is reserved."""
        share = self.settings.garbage_collection_threshold
        if not share or self.capacity is None or self.reserved <= share * self.capacity:
            return
        target = self.reserved - int(share * self.capacity)
        whole = [block for block in self._free_blocks() if block.whole and not block.pool.small]
        ages = {id(block): block.pool.searches - block.inserted for block in whole}
        while whole and target > 0:
            mean = sum(ages[id(block)] for block in whole) / len(whole)
            old = [block for block in whole if ages[id(block)] >= mean]
            for block in old:
                self._release(block)
                target -= block.size
            whole = [block for block in whole if ages[id(block)] < mean]

    def _release_oversize(self, pool: BlockPool, size: int) -> bool:
        """Release cached blocks that are not split by setting, enough for `size` bytes."""
        most = self.settings.max_split_size
        if most is None:
            return False
        size = max(size, most)
        at = bisect_left(pool.blocks, (size,))
        if at < len(pool.blocks):
            self._release(pool.blocks[at][2])
            return True
        released = 0
        while pool.blocks and released < size and pool.blocks[-1][0] >= most:
            released += pool.blocks[-1][0]
            self._release(pool.blocks[-1][2])
        return released >= size

    def _is_split(self, block: CachedBlock, size: int) -> bool:
        """True if the part of the block beyond `size` is worth keeping."""
        rest = block.size - size
        if block.pool.small or self.settings.expandable_segments:
            return rest >= UNIT
        most = self.settings.max_split_size
        return rest > SMALL and (most is None or size < most)

    def _split(self, block: CachedBlock, size: int) -> None:
        other = _cut(block, size)
        other.free = True
        block.pool.put(other)

    def _range_block(self, pool: BlockPool, size: int) -> CachedBlock | None:
        """Map pages at the lowest address where `size` bytes fit."""
        block = self._candidate(pool, size)
        if not block.mapped:
            mapped = self._map(block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            assert block.after is not None
            grown = self._map(block.after, min(size - block.size, block.after.size))
            if grown is None:
                return None
            block = grown
        pool.remove(block)
        return block

    def _candidate(self, pool: BlockPool, size: int) -> CachedBlock:
        for _, block in pool.unmapped:
            before = block.before
            first = before if before is not None and before.free else block
            if _free_space(first, size) >= size:
                return first
        start = self._place(_PAGES * pool.page)
        block = CachedBlock(
            pool, start, _PAGES * pool.page, free=True, mapped=False, range_start=start
        )
        pool.put_unmapped(block)
        return block

    def _map(self, block: CachedBlock, size: int) -> CachedBlock | None:
        """Map whole pages of an unmapped block, merge with free neighbours, and return the free block."""
        size = -(-size // block.pool.page) * block.pool.page
        if not self._fits(size):
            return None
        block.pool.remove(block)
        if size < block.size:
            rest = _cut(block, size)
            rest.free, rest.mapped = True, False
            block.pool.put_unmapped(rest)
        block.mapped = block.free = True
        self.mapped += 1
        self.hold(size)
        block = _merged(block)
        block.pool.put(block)
        return block

    def _unmap(self, block: CachedBlock) -> None:
        """Unmap the whole pages of a free block, and drop a range that has none left."""
        page, start = block.pool.page, block.range_start
        assert start is not None
        first = start - (start - block.address) // page * page
        last = start + (block.address + block.size - start) // page * page
        if first >= last:
            return
        block.pool.remove(block)
        if last < block.address + block.size:
            rest = _cut(block, last - block.address)
            rest.free = True
            block.pool.put(rest)
        if first > block.address:
            middle = _cut(block, first - block.address)
            block.pool.put(block)
            block = middle
        block.free, block.mapped = True, False
        self.reserved -= block.size
        block = _merged(block)
        if not block.whole:
            block.pool.put_unmapped(block)


def rounded(size: int) -> int:
    """Return the bytes that the allocator uses for a request, with its default settings."""
    return -(-size // UNIT) * UNIT


def _cut(block: CachedBlock, size: int) -> CachedBlock:
    """Cut a block off after `size` bytes and return the rest."""
    rest = CachedBlock(
        block.pool, block.address + size, block.size - size, range_start=block.range_start
    )
    rest.before, rest.after = block, block.after
    if block.after is not None:
        block.after.before = rest
    block.after = rest
    block.size = size
    return rest


def _merged(block: CachedBlock) -> CachedBlock:
    """Merge a block that is in no pool with its free neighbours, and return the result, in no pool."""
    after, before = block.after, block.before
    if after is not None and after.free and after.mapped == block.mapped:
        block.pool.remove(after)
        _join(block, after)
    if before is not None and before.free and before.mapped == block.mapped:
        block.pool.remove(before)
        _join(before, block)
        return before
    return block


def _join(block: CachedBlock, after: CachedBlock) -> None:
    block.size += after.size
    block.after = after.after
    if after.after is not None:
        after.after.before = block


def _free_space(block: CachedBlock | None, enough: int) -> int:
    """Return the free bytes from a block on, mapped or not, up to `enough`."""
    size = 0
    while block is not None and block.free and size < enough:
        size += block.size
        block = block.after
    return size
