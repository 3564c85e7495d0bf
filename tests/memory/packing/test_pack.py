"""Packings are valid, as low as they can be where that can be told, and never above largest-first."""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
import tracemalloc
from dataclasses import replace

import pytest

import draws
from memory.packing.instances import (
    any_instance,
    can_be_below,
    crowded,
    cut,
    largest_first,
    lowest_height,
    most_alive,
    of,
)
from torchtrim.errors import UsageError
from torchtrim.memory.packing import Buffer, Packing, engine, pack, why_invalid
from torchtrim.memory.packing import packer as improving
from torchtrim.memory.packing.buffers import problem_of
from torchtrim.memory.packing.packer import Placing, ranks

ALIGNMENTS = (1, 1, 1, 4, 7)


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(improving, "can_compile", lambda: False)


def height_of(buffers: list[Buffer], packing: Packing) -> int:
    return max((packing.offsets[b.id] + b.size for b in buffers if b.takes_room), default=0)


def check(buffers: list[Buffer], packing: Packing, alignment: int = 1) -> None:
    assert why_invalid(buffers, packing.offsets, alignment=alignment) is None
    assert packing.height == height_of(buffers, packing)
    assert packing.lower_bound <= packing.height
    assert list(packing.offsets) == [b.id for b in buffers]


@pytest.mark.parametrize("block", range(10))
def test_ten_thousand_random_instances(block: int) -> None:
    for number in draws.some(range(1000 * block, 1000 * (block + 1))):
        alignment = ALIGNMENTS[number % len(ALIGNMENTS)]
        buffers = any_instance(number, most=12 if number % 5 else 60)
        packing = pack(buffers, alignment=alignment, seconds=0 if number % 4 else None)
        check(buffers, packing, alignment)
        if alignment == 1:
            assert packing.lower_bound == most_alive(buffers)
            assert packing.height <= largest_first(buffers)


@pytest.mark.parametrize("block", range(5))
def test_small_ones_are_packed_as_low_as_any_order_packs_them(block: int) -> None:
    for number in draws.some(range(300 * block, 300 * (block + 1))):
        buffers = any_instance(number, most=6)
        lowest = lowest_height(buffers)
        packing = pack(buffers)
        assert (packing.height, packing.optimal) == (lowest, True), number


@pytest.mark.parametrize("alignment", [2, 8, 4096])
def test_an_alignment_bounds_and_places(alignment: int) -> None:
    for number in draws.some(range(200)):
        buffers = any_instance(number, most=6)
        packing = pack(buffers, alignment=alignment, seconds=0)
        lowest = lowest_height(buffers, alignment)
        check(buffers, packing, alignment)
        assert packing.lower_bound <= lowest <= packing.height
        assert not packing.optimal or packing.height == lowest


def test_an_optimum_above_the_bound_is_proven() -> None:
    """Eleven buffers, seven bytes alive at each of eight moments, and no packing below eight bytes."""
    buffers = crowded(673, moments=8, level=7)
    packing = pack(buffers)
    check(buffers, packing)
    assert (packing.height, packing.lower_bound, packing.optimal) == (8, 7, True)
    assert not can_be_below(8, buffers)


def test_crowded_ones() -> None:
    for number in draws.some(range(2000)):
        buffers = crowded(number)
        packing = pack(buffers)
        check(buffers, packing)
        assert packing.lower_bound == 6
        assert packing.height == 6 or packing.optimal


@pytest.mark.parametrize("number", range(6))
def test_a_square_is_put_together_again(number: int, without_numba: None) -> None:
    buffers = cut(number, 40)
    packing = pack(buffers)
    check(buffers, packing)
    assert (packing.height, packing.optimal) == (1024, True)
    assert pack(buffers, seconds=0).height > 1024


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_compiled_and_plain_loops_do_the_same(number: int) -> None:
    pytest.importorskip("numba")
    buffers = cut(number, 30)
    problem = problem_of(buffers, 1)
    order = ranks(problem, number)
    found = []
    for one in (engine.plain(), engine.compiled()):
        work = one.room(problem.count, len(problem.load))
        rows = tuple(map(one.array, improving.rows_of(problem, order)))
        ended = one.search(rows, len(problem.load), 1024, (5000, 10**9), work)
        columns = tuple(map(one.array, problem.rows))
        heights = []
        for tightest in (True, False):
            offsets = one.empty(problem.count)
            room = tuple(one.empty(problem.count) for _ in range(4))
            heights.append(one.place(one.array(order), columns, tightest, offsets, room))
            heights += map(int, offsets)
        found.append((ended, *map(int, work[0]), *map(int, work[8]), *heights))
    assert found[0] == found[1]


def test_the_same_in_another_process() -> None:
    code = (
        "from memory.packing.instances import cut\n"
        "from torchtrim.memory.packing import pack\n"
        "print(list(pack(cut(3, 40), seconds=0).offsets.values()), pack(cut(1, 25)))"
    )
    run = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": "tests"},
        ).stdout
        for seed in ("1", "2")
    ]
    assert run[0] == run[1] != ""


def test_a_time_limit_ends_the_search(without_numba: None) -> None:
    """One that cannot reach its bound soon: the result is valid, and no worse than the greedy one."""
    buffers = cut(11, 200)
    packing = pack(buffers, seconds=0.3)
    check(buffers, packing)
    assert packing.height <= pack(buffers, seconds=0).height


def own_alignments(number: int, most: int) -> list[Buffer]:
    chance = random.Random(number)
    return [
        replace(b, alignment=chance.choice((1, 1, 2, 3, 8)))
        for b in any_instance(number, most=most)
    ]


def test_each_buffer_has_its_own_alignment() -> None:
    for number in draws.some(range(400)):
        buffers = own_alignments(number, most=5)
        alignment = (1, 4)[number % 2]
        packing = pack(buffers, alignment=alignment)
        check(buffers, packing, alignment)
        lowest = lowest_height(buffers, alignment)
        assert packing.height == lowest if packing.optimal else packing.height >= lowest, number


def test_own_alignments_without_a_search_and_compiled() -> None:
    for number in draws.some(range(100)):
        buffers = own_alignments(number, most=60)
        check(buffers, pack(buffers, seconds=0))
    pytest.importorskip("numba")
    buffers = [replace(b, alignment=(1, 4)[b.size % 2]) for b in cut(5, 40)]
    check(buffers, pack(buffers, 1400))


def test_the_search_ends_where_the_capacity_is_met(without_numba: None) -> None:
    """The bound is 1024, and nothing that is met on the way to it is passed by."""
    buffers = cut(11, 200)
    heights: list[int] = []
    packing = pack(buffers, 1250, better=lambda found: heights.append(found.height))
    check(buffers, packing)
    assert packing.height == heights[-1] <= 1250
    assert all(height > 1250 for height in heights[:-1])
    assert heights == sorted(set(heights), reverse=True)


def test_each_better_packing_is_told_of_and_holds(without_numba: None) -> None:
    buffers = cut(3, 60)
    told: list[Packing] = []
    last = pack(buffers, better=told.append)
    for packing in told:
        check(buffers, packing)
    assert told[-1] == last


def test_what_ends_too_high_is_moved_forward(without_numba: None) -> None:
    """Lower than every greedy order, by no search."""
    problem = problem_of(cut(1, 60), 1)
    placing = Placing(problem, engine.plain())
    greedy_heights = [problem.height(offsets) for offsets in placing.greedy()]
    later = [problem.height(o) for o in placing.hoisted(1024, math.inf, endless=False)]
    assert min(later) < min(greedy_heights)


def test_more_seconds_try_the_same_and_then_more(
    monkeypatch: pytest.MonkeyPatch, without_numba: None
) -> None:
    """With a clock that counts how often it is read, the heights with less time lead those with more."""
    buffers = cut(11, 120)
    runs: list[list[int]] = []
    for seconds in (30, 300, 3000, None):
        clock = iter(range(10**9))
        monkeypatch.setattr(improving.time, "monotonic", lambda clock=clock: next(clock))
        heights: list[int] = []
        pack(buffers, seconds=seconds, better=lambda p, heights=heights: heights.append(p.height))
        runs.append(heights)
    for less, more in itertools.pairwise(runs[:3]):
        assert more[: len(less)] == less
    assert runs[3][: len(runs[0])] == runs[0]


def test_nothing_to_pack() -> None:
    assert pack([]) == Packing(offsets={}, height=0, lower_bound=0, optimal=True)
    flat = [Buffer("none", 0, 9, 0), Buffer("never", 4, 4, 100)]
    assert pack(flat) == Packing(
        offsets={"none": 0, "never": 0}, height=0, lower_bound=0, optimal=True
    )


def test_equal_buffers_are_stacked() -> None:
    packing = pack(of([(0, 5, 10)] * 30))
    assert sorted(packing.offsets.values()) == list(range(0, 300, 10))
    assert packing.optimal


def test_one_after_another_shares_the_place() -> None:
    packing = pack(of([(t, t + 1, 100) for t in range(50)]))
    assert set(packing.offsets.values()) == {0}


@pytest.mark.parametrize("capacity", [0, 1, 149, 150, 10**30])
def test_a_capacity_is_for_the_caller_to_compare(capacity: int) -> None:
    packing = pack(of([(0, 2, 100), (1, 3, 50)]), capacity)
    assert (packing.height, packing.optimal) == (150, True)


def test_the_highest_needs_no_padding() -> None:
    packing = pack(of([(0, 2, 10), (0, 2, 3)]), alignment=8)
    assert (packing.height, packing.lower_bound, packing.optimal) == (18, 18, True)


def test_memory_grows_with_the_buffers_and_not_with_their_pairs(without_numba: None) -> None:
    peaks = []
    for many in (500, 2000):
        buffers = of([(i, 3000 + i, 1 + i * 7919 % 1009) for i in range(many)])
        tracemalloc.start()
        packing = pack(buffers)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert packing.optimal
    assert peaks[1] < 6 * peaks[0]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (Buffer("b", 3, 2, 1), ["buffers[1]", "'b'", "ends at 2", "begins at 3"]),
        (Buffer("b", 0, 2, -1), ["buffers[1]", "'b'", "size is -1"]),
        (Buffer("b", 0.5, 2, 1), ["buffers[1]", "'b'", "lower is 0.5", "integer"]),  # type: ignore[arg-type]
        (Buffer("b", 0, 2, True), ["size is True"]),
        (Buffer("b", 0, 2, 1, 0), ["buffers[1]", "'b'", "alignment is 0"]),
        (Buffer("b", 0, 2, 1, 1.5), ["alignment is 1.5"]),  # type: ignore[arg-type]
        (Buffer("b", 0, math.nan, 1), ["upper is nan"]),  # type: ignore[arg-type]
        (Buffer("a", 0, 2, 1), ["buffers[1]", "'a'", "earlier"]),
        (Buffer("b", 0, 2, 2**60), ["bytes in total", "2**58"]),
    ],
)
def test_wrong_buffers_are_named(wrong: Buffer, words: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        pack([Buffer("a", 0, 1, 1), wrong])
    assert all(word in str(raised.value) for word in words)


@pytest.mark.parametrize(
    "options",
    [
        {"alignment": 0},
        {"alignment": 2.0},
        {"capacity": -1},
        {"capacity": "1MiB"},
        {"seconds": -1},
        {"seconds": math.nan},
    ],
)
def test_wrong_options_are_named(options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=str(next(iter(options)))):
        pack([], **options)  # type: ignore[arg-type]
