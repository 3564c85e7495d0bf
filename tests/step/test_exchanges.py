"""Exchanges that outlast backward, for buckets of one size or another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from profiles import exchanging_step
from torchtrim.capture.modules import Modules
from torchtrim.capture.replicas import Replicas
from torchtrim.step.exchanges import (
    BUCKET_CAPS,
    MIB,
    ExchangeCost,
    Overlap,
    ReadyGradient,
    exchange_cost_of,
    in_buckets,
    overlap_of,
)

FOUR = tuple(ReadyGradient(float(number), 4 * MIB) for number in range(1, 5))


def test_a_bucket_is_closed_that_has_reached_its_size() -> None:
    found = in_buckets(FOUR, 8 * MIB, 8 * MIB)
    assert found == [ReadyGradient(2.0, 8 * MIB), ReadyGradient(4.0, 8 * MIB)]
    assert [one.bytes // MIB for one in in_buckets(FOUR, 9 * MIB, 9 * MIB)] == [12, 4]
    assert in_buckets(FOUR, 256 * MIB, 256 * MIB) == [ReadyGradient(4.0, 16 * MIB)]


def test_the_first_bucket_is_small_and_last_where_unused_parameters_are_looked_for() -> None:
    assert in_buckets(FOUR, 8 * MIB, MIB) == [
        ReadyGradient(1.0, 4 * MIB),
        ReadyGradient(3.0, 8 * MIB),
        ReadyGradient(4.0, 4 * MIB),
    ]
    assert in_buckets(FOUR, 8 * MIB, MIB, rebuilt=False) == [
        ReadyGradient(1.0, 4 * MIB),
        ReadyGradient(3.0, 8 * MIB),
        ReadyGradient(4.0, 4 * MIB),
    ]
    assert in_buckets(FOUR[:3], 8 * MIB, MIB, rebuilt=False) == [
        ReadyGradient(2.0, 8 * MIB),
        ReadyGradient(3.0, 4 * MIB),
    ]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"bucket_cap_mb": 2},
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "bucket_cap_mb": 2},
    ],
)
def test_buckets_are_those_of_torch(given: dict[str, Any], tmp_path: Path) -> None:
    """As its reducer says after a few steps; each parameter is ready after those behind it."""
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        net = nn.Sequential(*(nn.Linear(300, 300) for _ in range(6)), nn.Linear(300, 3000))
        wrapped = nn.parallel.DistributedDataParallel(net, **given)
        for _ in range(3):
            wrapped(torch.ones(2, 300)).sum().backward()
        modules = Modules()
        modules.add_root(wrapped)
        (replica,) = Replicas().put_into(exchanging_step([]), modules).replicas
        said = wrapped._get_ddp_logging_data()
    finally:
        dist.destroy_process_group()
    torchs = said.get("rebuilt_bucket_sizes") or said["bucket_sizes"]
    behind = enumerate(reversed([*net.parameters()]))
    ready = [ReadyGradient(float(number), one.numel() * 4) for number, one in behind]
    cap, first = replica.bucket_bytes, replica.first_bytes or replica.bucket_bytes
    ours = in_buckets(ready, cap, first, rebuilt=not replica.find_unused)
    assert [one.bytes for one in ours] == [int(one) for one in torchs.split(", ")]


def test_exchanges_follow_each_other_and_outlast_backward() -> None:
    """An exchange of a gradient takes half a second more than backward needs for the next one."""
    overlap = Overlap(FOUR, 4.0, 25 * MIB, ExchangeCost(0.5, 0.25 / MIB))
    assert overlap.exposed_seconds(4 * MIB) == pytest.approx(1 + 4 * 1.5 - 4)
    assert overlap.exposed_seconds(8 * MIB) == pytest.approx(2 + 2 * 2.5 - 4)
    assert overlap.exposed_seconds(25 * MIB) == pytest.approx(4.5)
    assert overlap.exposed_now(width=0.5) == pytest.approx(2.5)
    small = overlap._replace(first=MIB)
    assert small.exposed_now() == pytest.approx(4 + 3.5 - 4)
    assert small.exposed_seconds(25 * MIB) == pytest.approx(4.5)


def test_small_buckets_are_best_where_bytes_count_and_large_ones_where_latency_does() -> None:
    bytes_count = Overlap(FOUR, 4.0, 25 * MIB, ExchangeCost(0.01, 0.25 / MIB))
    assert bytes_count.best_cap() == (MIB, pytest.approx(4.01 - 1.04))
    latency_counts = Overlap(FOUR, 4.0, MIB, ExchangeCost(2.0, 0.01 / MIB))
    cap, saved = latency_counts.best_cap()
    assert cap == 16 * MIB
    assert saved == pytest.approx(1 + 4 * 2.04 - (4 + 2.16))
    assert Overlap(FOUR, 4.0, BUCKET_CAPS[0], ExchangeCost(0.0, 0.0)).best_cap() == (
        BUCKET_CAPS[0],
        0.0,
    )


def test_latency_and_rate_are_fitted() -> None:
    link = exchange_cost_of(exchanging_step([(MIB, 0.3), (3 * MIB, 0.5)]))
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
