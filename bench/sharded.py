"""Estimated peaks of a rank beside measured ones, for models that FSDP2 shards.

    python -m bench.sharded [--part measured|oracle|llama] [--only NAME ...] [--worlds N ...] [--save]

Measured: each of 2 and 4 processes over gloo shards the model for real and trains it for two steps; the
second is watched by the allocator's own events, and the rank that needs most counts. Gloo's threads let go
of a collective's buffers a moment after it, by chance before or after the next operator: each process
pauses there, so that what is measured is the program's. Estimated: the same step from one process.

The oracle is torch's `FSDPMemTracker` in a group of 8 and 1,024 ranks that only seem to be there. It knows of
no scratch of kernels, so it is compared with the tracked peak.

`llama`: Llama-3-8B, a sequence of 4,096 words on each of 8 H100s; what is answered, and in how many seconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tests.cases import zoo
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.spawn import spawn
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench import llama, machine, models
from bench.estimates import measured
from torchtrim import Sharding, TrainStep, estimate
from torchtrim.capture.recording import tensors_in
from torchtrim.planner.estimate import unused_bytes
from torchtrim.runner.fake_process_group import repeated

WORLDS = (2, 4)
FAR_WORLDS = (8, 1024)
_PAUSE = 0.1
MODELS = ("mlp", "gpt2", "llama", "vit", "resnet", "t5", "bert", "qwen2", "mixer", "convnext")
CASES: dict[str, Sharding] = {
    "plain": Sharding(),
    "no reshard": Sharding(reshard=False),
    "bfloat16": Sharding(compute="bfloat16"),
}


def workload(name: str) -> TrainStep:
    """A step of the model with AdamW."""
    torch.manual_seed(0)
    sample = _mlp() if name == "mlp" else models.MODELS[name]()
    sample.model.train()
    optimizer = torch.optim.AdamW(sample.model.parameters(), 1e-3)
    return TrainStep(sample.model, sample.loss, optimizer, sample.batch)


def _mlp() -> zoo.Sample:
    layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(6)]
    model = nn.Sequential(nn.Linear(64, 512), nn.Sequential(*layers), nn.Linear(512, 10))
    batch = (torch.randn(512, 64), torch.randint(10, (512,)))
    return zoo.Sample(model, batch, lambda m, b: F.cross_entropy(m(b[0]), b[1]))


def shard(name: str, mesh: DeviceMesh, case: Sharding) -> TrainStep:
    """The step of a model that is sharded as a person would."""
    work = workload(name)
    model = work.model
    options: dict[str, Any] = {"mesh": mesh}
    if not case.reshard:
        options["reshard_after_forward"] = False
    if case.compute:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=getattr(torch, case.compute), reduce_dtype=torch.float32
        )
    for _, block in reversed(list(repeated(model))):
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return TrainStep(model, work._loss_fn, optimizer, work.batch)


def pause_after_collectives() -> None:
    """Have every collective of FSDP2's be followed by a pause."""
    for name in ("all_gather_single", "reduce_scatter_single"):
        original = getattr(torch.distributed, name)

        def paused(*args: Any, original: Any = original, **options: Any) -> Any:
            result = original(*args, **options)
            time.sleep(_PAUSE)
            return result

        setattr(torch.distributed, name, paused)


def _rank(number: int, world: int, name: str, case: str, port: int, folder: str) -> None:
    """What one process of those that are measured does."""
    torch.set_num_threads(1)
    zoo.import_libraries()
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=number, world_size=world)
    pause_after_collectives()
    work = shard(name, init_device_mesh("cpu", (world,)), CASES[case])
    gc.collect()
    profile = measured(work)
    found = {
        "measured": profile.peak_bytes - unused_bytes(profile),
        "tracked": profile.tracked_peak_bytes - unused_bytes(profile),
    }
    Path(folder, str(number)).write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def over_gloo(name: str, world: int, case: str) -> dict[str, int]:
    """What the rank that needs most was measured to need."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
        free.close()
        spawn(_rank, (world, name, case, port, folder), nprocs=world)
        ranks = [json.loads(Path(folder, str(number)).read_text()) for number in range(world)]
    most: dict[str, int] = max(ranks, key=lambda rank: rank["measured"])
    return most


def estimated(name: str, world: int, case: str) -> dict[str, Any]:
    """What one process says of a rank."""
    began = time.perf_counter()
    gc.collect()
    found = estimate(lambda: workload(name), ranks=world, fsdp=CASES[case])
    unused = unused_bytes(found.profile)
    return {
        "estimated": found.peak_bytes - unused,
        "estimated_tracked": found.profile.tracked_peak_bytes - unused,
        "by_kind": found.by_kind,
        "seconds": round(time.perf_counter() - began, 2),
    }


def tracked_by_torch(name: str, world: int) -> int:
    """The peak that `FSDPMemTracker` tells, of the second step."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        work = shard(name, init_device_mesh("cpu", (world,)), CASES["plain"])
        tracker = FSDPMemTracker(work.model, work.optimizers[0])
        tracker.track_inputs(tuple(tensors_in(work.batch)))
        for _ in range(2):
            tracker.reset_mod_stats()
            with tracker:
                work.step(0)
        return max(one["Total"] for one in tracker.get_tracker_snapshot("peak").values())
    finally:
        torch.distributed.destroy_process_group()


def beside_torch(name: str, world: int) -> dict[str, Any]:
    """Torch's tracker beside the estimate of what it tracks."""
    theirs, ours = tracked_by_torch(name, world), estimated(name, world, "plain")
    return {"tracker": theirs, **ours, "error": ours["estimated_tracked"] / theirs - 1}


def compared(name: str, world: int, case: str) -> dict[str, Any]:
    """Measured beside estimated."""
    real, guess = over_gloo(name, world, case), estimated(name, world, case)
    return {**real, **guess, "error": guess["estimated"] / real["measured"] - 1}


def eight_billion() -> TrainStep:
    """A step of Llama-3-8B with AdamW."""
    model = llama.Llama()
    ids = torch.randint(128_256, (1, 4097))
    return TrainStep(model, llama.loss, torch.optim.AdamW(model.parameters()), ids)


def of_llama() -> dict[str, Any]:
    """What is said of it on 8 H100s, for each case."""
    found = {}
    for case, sharding in CASES.items():
        began = time.perf_counter()
        one = estimate(eight_billion, device="h100", ranks=8, fsdp=sharding)
        fits, kinds = one.fits("80GiB"), one.by_kind
        seconds = time.perf_counter() - began
        found[case] = {
            "peak": one.peak_bytes,
            "reserved": one.reserved_bytes,
            "fits_80GiB": fits,
            "by_kind": kinds,
            "recomputed": one.facts.recomputed_bytes,
            "seconds": round(seconds, 1),
            "seconds_with_recomputation": round(time.perf_counter() - began, 1),
        }
        print(case, found[case], flush=True)
    return found


def main() -> None:
    """Run what was asked for, print a line for each, and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=MODELS)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--worlds", nargs="*", type=int)
    parser.add_argument("--part", choices=("measured", "oracle", "llama"), default="measured")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if options.part == "llama":
        sizes = of_llama()
        if options.save:
            machine.save("sharded_llama", {"cases": sizes})
        return
    oracle = options.part == "oracle"
    torch.set_num_threads(1)
    zoo.import_libraries()
    found: dict[str, Any] = {}
    for name in options.only:
        for world in options.worlds or (FAR_WORLDS if oracle else WORLDS):
            for case in ("plain",) if oracle else options.cases:
                one = beside_torch(name, world) if oracle else compared(name, world, case)
                found.setdefault(name, {})[f"{case}, {world} ranks"] = one
                print(f"{name:10} {world} {case:12} {one['error']:+.4%} {one}", flush=True)
    if options.save:
        machine.save("sharded_tracker" if oracle else "sharded", {"models": found})


if __name__ == "__main__":
    main()
