"""A process that seems to be one of many, and its model, which `fully_shard` shards for real."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh

import torchtrim
from runner import gloo
from torchtrim import Sharding, UsageError
from torchtrim.capture.recording import tensors_in
from torchtrim.errors import ApplyFailed
from torchtrim.planner.estimate import unused_bytes
from torchtrim.runner.fake_process_group import fake_ranks, repeated

ROOT = Path(__file__).parents[2]
TRACKED_ALIKE = 256
"""Bytes: torch's tracker counts what C++ makes of numbers otherwise."""


def estimated(name: str, ranks: int, sharding: Sharding | bool = True, **options: Any) -> Any:
    return torchtrim.estimate(gloo.WORKLOADS[name], ranks=ranks, fsdp=sharding, **options)


def own_bytes(found: Any) -> int:
    """The peak without what else this process keeps."""
    return int(found.peak_bytes - unused_bytes(found.profile))


@contextlib.contextmanager
def on_fakes(options: dict[str, Any], ranks: int) -> Iterator[None]:
    """Fake tensors, and among the options a mesh whose own are real."""
    options["mesh"] = init_device_mesh("cpu", (ranks,))
    with FakeTensorMode():
        yield


def tracked_by_torch(name: str, ranks: int, **options: Any) -> int:
    """What torch's own tracker says of the second step."""
    with fake_ranks(ranks), on_fakes(options, ranks):
        work = gloo.sharded(name, **options)
        tracker = FSDPMemTracker(work.model, work.optimizers[0])
        tracker.track_inputs(tuple(tensors_in(work.batch)))
        for _ in range(2):
            tracker.reset_mod_stats()
            with tracker:
                work.step(0)
    return max(one["Total"] for one in tracker.get_tracker_snapshot("peak").values())


@pytest.mark.parametrize("ranks", [8, pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", gloo.WORKLOADS)
def test_it_is_what_torchs_tracker_says(name: str, ranks: int) -> None:
    found = estimated(name, ranks)
    ours = found.profile.tracked_peak_bytes - unused_bytes(found.profile)
    assert abs(ours - tracked_by_torch(name, ranks)) <= TRACKED_ALIKE


@pytest.mark.slow
def test_without_resharding_it_is_too() -> None:
    found = estimated("decoder", 8, Sharding(reshard=False))
    ours = found.profile.tracked_peak_bytes - unused_bytes(found.profile)
    theirs = tracked_by_torch("decoder", 8, reshard_after_forward=False)
    assert abs(ours - theirs) <= TRACKED_ALIKE


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes are forks")
def test_it_is_what_two_processes_need(tmp_path: Path) -> None:
    folders = [ROOT / "src", ROOT / "tests"]
    subprocess.run(
        [sys.executable, "-m", "runner.gloo", "2", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        check=True,
        timeout=900,
    )
    ranks = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    for name in gloo.WORKLOADS:
        measured = max(rank[name] for rank in ranks)
        assert abs(own_bytes(estimated(name, 2)) / measured - 1) <= 0.03


def test_each_part_is_a_share() -> None:
    whole, shared = torchtrim.estimate(gloo.layered), estimated("layered", 4)
    padded = sum(-(-p.shape[0] // 4) * p[0].numel() for p in gloo.Layered().parameters()) * 4
    assert shared.facts.parameter_bytes == padded
    assert shared.facts.gradient_bytes == padded
    assert shared.facts.parameter_bytes < 0.3 * whole.facts.parameter_bytes
    assert shared.facts.sharded.blocks == tuple(f"Layered.layers.{n}" for n in range(4))
    assert shared.by_kind["gathered"] > 0


@pytest.mark.slow
def test_half_the_type_is_half_of_what_is_gathered() -> None:
    found = {
        name: estimated("decoder", 4, Sharding(compute=kind), device="h100")
        for name, kind in (("plain", ""), ("bfloat16", "bfloat16"))
    }
    activations = {name: one.by_kind["activation"] for name, one in found.items()}
    assert activations["bfloat16"] < 0.7 * activations["plain"]


def test_on_a_device_what_is_gathered_goes_again() -> None:
    found = estimated("layered", 4, device="h100")
    assert found.profile.device == "emulated h100"
    assert found.peak_bytes == found.profile.tracked_peak_bytes
    assert found.reserved_bytes is not None
    assert found.reserved_bytes >= found.peak_bytes


def test_what_is_offloaded_lies_on_the_host() -> None:
    here = estimated("layered", 4, device="h100")
    there = estimated("layered", 4, Sharding(offload=True), device="h100")
    state = here.facts.parameter_bytes + here.facts.optimizer_bytes
    assert here.peak_bytes - there.peak_bytes >= 0.9 * state


@pytest.mark.slow
def test_a_longer_batch_is_of_another_model() -> None:
    found = estimated("layered", 4)
    grown = found.grown("batch", 2 * own_bytes(found) + unused_bytes(found.profile))
    assert grown.largest > 2048


@pytest.fixture
def in_a_group() -> Iterator[None]:
    with fake_ranks(2):
        yield


def test_a_process_of_a_group_is_refused(in_a_group: None) -> None:
    with pytest.raises(UsageError, match="in a process group already"):
        estimated("layered", 4)


def test_the_process_is_as_it_was() -> None:
    estimated("layered", 4)
    assert not torch.distributed.is_initialized()
    assert "WORLD_SIZE" not in os.environ
    assert torch.nn.parallel.DistributedDataParallel.__module__.startswith("torch.")


def test_a_live_model_is_refused() -> None:
    with pytest.raises(UsageError, match="pass a function"):
        torchtrim.estimate(gloo.layered(), ranks=4, fsdp=True)


def test_ranks_are_wanted() -> None:
    with pytest.raises(UsageError, match="the number of ranks"):
        torchtrim.estimate(gloo.layered, fsdp=True)


def test_a_pattern_that_nothing_matches_is_refused() -> None:
    with pytest.raises(
        ApplyFailed, match=r"no module with parameters matches 'blocks\.\*'.*layers"
    ):
        estimated("layered", 4, Sharding(blocks=("blocks.*",)))


def test_a_weight_of_two_blocks_is_refused() -> None:
    with pytest.raises(ApplyFailed, match=r"tokens\.weight and head\.weight are one parameter"):
        estimated("decoder", 4, Sharding(blocks=("tokens", "head")))


class Tower(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (gloo.Layered(), ["layers.0", "layers.1", "layers.2", "layers.3"]),
        (nn.Linear(2, 2), []),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), ["0", "2"]),
        (nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Linear(2, 2)), []),
        (
            Tower(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))),
            ["parts.1.0", "parts.1.1"],
        ),
        (Tower(Tower(nn.Linear(2, 2)), Tower(nn.Linear(2, 2))), ["parts.0", "parts.1"]),
    ],
    ids=["list", "none", "sequential", "without parameters", "inner", "outermost"],
)
def test_what_repeats_is_a_block(model: nn.Module, expected: list[str]) -> None:
    assert [path for path, _ in repeated(model)] == expected
