from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from torchtrim.memory.caching import CachingAllocator, rounded

KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(
    ("size", "given_"), [(1, 512), (512, 512), (513, 1024), (1000, 1024), (MIB, MIB)]
)
def test_sizes_are_rounded_to_512_bytes(size: int, given_: int) -> None:
    assert rounded(size) == given_
    allocator = CachingAllocator()
    allocator.malloc(size)
    assert allocator.allocated == given_


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (25 * MIB, 26 * MIB),
    ],
)
def test_segments_by_size(size: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.malloc(size)
    assert allocator.reserved == segment


def test_nothing_takes_nothing() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(0))
    assert allocator.allocated == allocator.reserved == allocator.mallocs == 0


def test_small_blocks_share_a_segment() -> None:
    allocator = CachingAllocator()
    for _ in range(4096):
        allocator.malloc(512)
    assert allocator.reserved == 2 * MIB
    allocator.malloc(512)
    assert allocator.reserved == 4 * MIB


def test_a_large_block_is_split_where_the_rest_is_of_use() -> None:
    allocator = CachingAllocator()
    allocator.malloc(12 * MIB - 512)
    assert allocator.reserved == 12 * MIB
    assert allocator.allocated == 12 * MIB  # the rest of 512 bytes is not split off
    other = CachingAllocator()
    other.malloc(5 * MIB)
    assert (other.allocated, other.reserved) == (5 * MIB, 20 * MIB)
    other.malloc(14 * MIB)
    assert (other.allocated, other.reserved) == (20 * MIB, 20 * MIB)


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    large = allocator.malloc(40 * MIB)
    middle = allocator.malloc(30 * MIB)
    allocator.free(large)
    allocator.free(middle)
    allocator.malloc(30 * MIB)
    allocator.malloc(40 * MIB)
    assert allocator.reserved == 70 * MIB
    assert allocator.segments == 2


def test_neighbours_that_are_free_become_one() -> None:
    allocator = CachingAllocator()
    handles = [allocator.malloc(5 * MIB) for _ in range(4)]
    assert allocator.reserved == 20 * MIB
    for handle in (handles[0], handles[2], handles[1], handles[3]):
        allocator.free(handle)
    allocator.malloc(20 * MIB)
    assert allocator.reserved == 20 * MIB


def test_a_hole_between_two_is_not_large_enough() -> None:
    allocator = CachingAllocator()
    handles = [allocator.malloc(5 * MIB) for _ in range(4)]
    allocator.free(handles[0])
    allocator.free(handles[2])
    allocator.malloc(10 * MIB)
    assert allocator.reserved == 30 * MIB
    assert allocator.split_bytes() == 10 * MIB


def test_streams_do_not_share() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(5 * MIB, stream=0))
    allocator.malloc(5 * MIB, stream=1)
    assert allocator.reserved == 40 * MIB


def test_small_and_large_do_not_share() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(15 * MIB))
    allocator.malloc(1)
    assert allocator.reserved == 16 * MIB + 2 * MIB


def test_emptying_gives_back_what_is_free_as_a_whole() -> None:
    allocator = CachingAllocator()
    held = allocator.malloc(512)
    allocator.free(allocator.malloc(30 * MIB))
    assert allocator.reserved == 32 * MIB
    assert allocator.split_bytes() == 2 * MIB - 512
    allocator.empty_cache()
    assert allocator.reserved == 2 * MIB
    assert allocator.released == 1
    allocator.free(held)
    allocator.empty_cache()
    assert allocator.reserved == 0


def test_peaks_of_a_sequence() -> None:
    allocator = CachingAllocator()
    first = allocator.malloc(30 * MIB)
    second = allocator.malloc(10 * MIB)
    allocator.free(first)
    third = allocator.malloc(12 * MIB)
    assert allocator.allocated == 22 * MIB
    assert allocator.peak_allocated == 40 * MIB
    assert allocator.peak_reserved == 40 * MIB
    allocator.reset_peaks()
    assert allocator.peak_allocated == 22 * MIB
    allocator.free(second)
    allocator.free(third)
    assert allocator.peak_allocated == 22 * MIB
    assert allocator.allocated == 0


SIZES = st.one_of(st.integers(0, 4 * KIB), st.integers(0, 3 * MIB), st.integers(0, 40 * MIB))


class Accounts(RuleBasedStateMachine):
    """Whatever is asked for and given back, the books agree."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = CachingAllocator()
        self.held: dict[int, int] = {}
        self.peak = 0

    @rule(size=SIZES, stream=st.integers(0, 1))
    def malloc(self, size: int, stream: int) -> None:
        handle = self.allocator.malloc(size, stream)
        assert handle not in self.held
        self.held[handle] = size
        self.peak = max(self.peak, self.allocator.allocated)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[handle]
        self.allocator.free(handle)

    @rule()
    def empty_cache(self) -> None:
        self.allocator.empty_cache()

    @invariant()
    def what_is_allocated_is_the_sum_of_what_lives(self) -> None:
        asked = sum(map(rounded, self.held.values()))
        large = sum(size > MIB for size in self.held.values())
        assert asked <= self.allocator.allocated <= asked + large * MIB
        assert self.allocator.mallocs - self.allocator.frees == len(
            [size for size in self.held.values() if size]
        )

    @invariant()
    def the_reserve_holds_it(self) -> None:
        assert self.allocator.allocated <= self.allocator.reserved
        assert self.allocator.reserved % (2 * MIB) == 0
        assert self.allocator.peak_allocated == self.peak
        assert self.allocator.peak_reserved >= self.allocator.reserved
        free = self.allocator.reserved - self.allocator.allocated
        assert 0 <= self.allocator.split_bytes() <= free

    @invariant()
    def living_blocks_do_not_overlap(self) -> None:
        spans = sorted(
            (block.address, block.address + block.size) for block in self.allocator._blocks.values()
        )
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))

    def teardown(self) -> None:
        for handle in self.held:
            self.allocator.free(handle)
        assert self.allocator.allocated == 0
        self.allocator.empty_cache()
        assert self.allocator.reserved == 0
        assert self.allocator.segments == self.allocator.released


TestAccounts = Accounts.TestCase


@given(st.lists(st.integers(1, MIB), max_size=40))
def test_small_blocks_are_allocated_to_the_byte(sizes: list[int]) -> None:
    allocator = CachingAllocator()
    for size in sizes:
        allocator.malloc(size)
    assert allocator.allocated == sum(map(rounded, sizes))
