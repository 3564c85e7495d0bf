"""Sets of frames against plain sets, and the heads of a stream."""

from hypothesis import given
from hypothesis import strategies as st

from torchtrim.stream.frames import FrameSet, Heads


@given(st.lists(st.integers(-40, 40), max_size=60))
def test_few_frames_are_known_exactly(frames: list[int]) -> None:
    kept = FrameSet(most=100)
    for frame in frames:
        kept.add(frame)
    assert len(kept) == len(set(frames))
    assert all(kept.knows(frame) is (frame in frames) for frame in range(-45, 46))


@given(st.lists(st.integers(0, 400), max_size=120))
def test_many_gaps_blur_but_never_deny(frames: list[int]) -> None:
    kept = FrameSet(most=4)
    for frame in frames:
        kept.add(frame)
        assert kept.ranges <= 4
    assert all(kept.knows(frame) is not False for frame in frames)
    surely = {frame for frame in range(401) if kept.knows(frame) is True}
    assert surely <= set(frames)


def test_a_steady_stream_is_one_range() -> None:
    for step in (1, 4, -1):
        kept = FrameSet()
        for frame in range(0, 10_000 * step, step):
            kept.add(frame)
        assert (kept.ranges, len(kept)) == (1, 10_000)
        assert kept.knows(400 * step) is True
        assert kept.knows(10_000 * step) is False


def test_an_excursion_keeps_the_place_that_was_left() -> None:
    heads = Heads(15)
    for frame in range(101):
        heads.move(frame)
    heads.move(10)
    assert (heads.now, heads.distance(90), heads.distance(12)) == (10, 10, 2)
    heads.move(101)
    assert (heads.now, heads.distance(86)) == (101, 15)
    heads.move(5000)
    assert heads.distance(101) == 0
    assert heads.distance(10) == 91


def test_before_the_first_move_nothing_is_far() -> None:
    heads = Heads(15)
    assert (heads.now, heads.distance(99)) == (None, 0)
    heads.move(3)
    heads.clear()
    assert heads.now is None
