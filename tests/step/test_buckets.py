"""Exchanges that outlast backward, for buckets of one size or another."""

from __future__ import annotations

import pytest

from profiles import exchanging_step
from torchtrim.step.buckets import CAPS, MIB, Link, Overlap, Ready, in_buckets, link_of, overlap_of

FOUR = tuple(Ready(float(number), 4 * MIB) for number in range(1, 5))


def test_a_bucket_is_closed_that_has_reached_its_size() -> None:
    found = [*in_buckets(FOUR, 8 * MIB)]
    assert found == [Ready(2.0, 8 * MIB), Ready(4.0, 8 * MIB)]
    assert [one.bytes // MIB for one in in_buckets(FOUR, 9 * MIB)] == [12, 4]
    assert [*in_buckets(FOUR, 256 * MIB)] == [Ready(4.0, 16 * MIB)]


def test_exchanges_follow_each_other_and_outlast_backward() -> None:
    """An exchange of a gradient takes half a second more than backward needs for the next one."""
    overlap = Overlap(FOUR, 4.0, 25 * MIB, Link(0.5, 0.25 / MIB))
    assert overlap.exposed_seconds(4 * MIB) == pytest.approx(1 + 4 * 1.5 - 4)
    assert overlap.exposed_seconds(8 * MIB) == pytest.approx(2 + 2 * 2.5 - 4)
    assert overlap.exposed_seconds(25 * MIB) == pytest.approx(4.5)
    assert overlap.exposed_seconds(25 * MIB, width=0.5) == pytest.approx(2.5)


def test_small_buckets_are_best_where_bytes_count_and_large_ones_where_latency_does() -> None:
    bytes_count = Overlap(FOUR, 4.0, 25 * MIB, Link(0.01, 0.25 / MIB))
    assert bytes_count.best_cap() == (MIB, pytest.approx(4.01 - 1.04))
    latency_counts = Overlap(FOUR, 4.0, MIB, Link(2.0, 0.01 / MIB))
    cap, saved = latency_counts.best_cap()
    assert cap == 16 * MIB
    assert saved == pytest.approx(1 + 4 * 2.04 - (4 + 2.16))
    assert Overlap(FOUR, 4.0, CAPS[0], Link(0.0, 0.0)).best_cap() == (CAPS[0], 0.0)


def test_latency_and_rate_are_fitted() -> None:
    link = link_of(exchanging_step([(MIB, 0.3), (3 * MIB, 0.5)]))
    assert link is not None
    assert link.latency == pytest.approx(0.2)
    assert link.seconds(2 * MIB) == pytest.approx(0.4)


@pytest.mark.parametrize("exchanges", [[], [(MIB, 0.3)], [(MIB, 0.5), (3 * MIB, 0.3)]])
def test_nothing_is_said_where_exchanges_do_not_tell(exchanges: list[tuple[int, float]]) -> None:
    profile = exchanging_step(exchanges)
    assert overlap_of(profile, profile.replicas[0]) is None


def test_gradients_are_ready_when_backward_has_made_them() -> None:
    profile = exchanging_step([(MIB, 0.3), (3 * MIB, 0.5)])
    found = overlap_of(profile, profile.replicas[0])
    assert found is not None
    assert [one.seconds for one in found.gradients] == pytest.approx([1, 2, 3, 4])
    assert (found.cap, found.end) == (25 * MIB, pytest.approx(4.0))
