"""Memory of the networks that OptNet published, planned and measured, beside eager and torch.compile.

    python -m bench.optnet [NETWORK ...] [--batch N ...] [--parts N] [--compile] [--no-training] [--save]

Each way runs in a process of its own. `outputs` and `workspace`: what the plan says that results take, and
operators besides; of eager, what operators are seen to make. `off_by`: what was measured, over their sum.
`allocated`: what the CPU allocator gave during one call, at its highest, over what was there before.
`process`: how far the process's resident memory rose, kernels' own buffers (oneDNN's reordered copies,
which the allocator does not see) included. `equal`: every bit of the results is eager's. OptNet's figures
are those of its README for "outputs", batch 128, float, before and after.

Training is one forward and backward at batch 64: `total` is what is alive at its peak, the batch left out, as
the plan says and as measured; OptNet's are the totals of its README, before (Torch7, which frees nothing) and
after. `saved_percent` is against the same: OptNet's before.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchtrim
from bench.machine import facts, save
from torchtrim.capture.allocator import CpuAllocator
from torchtrim.capture.recording import tensors_in
from torchtrim.evidence.evidence import bytes_of
from torchtrim.records.estimate import MemoryTable
from torchtrim.workflows.live_model import step_of

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from optnet_models import NETWORKS

OPTNET = {
    "alexnet": (397, 97),
    "vgg-A": (4386, 1960),
    "googlenet": (4390, 1993),
    "resnet-110": (1036, 32),
}
GOALS = {"alexnet": 90.2, "vgg-A": 1960, "googlenet": 490, "resnet-110": 24}
TRAINING = {
    "alexnet": (963, 816),
    "vgg-A": (5433, 4228),
    "googlenet": (6092, 4844),
    "resnet-110": (664, 428),
}
TRAINING_BATCH = 64
TRAINING_WAYS = ("train eager", "train planned")
WAYS = ("eager", "release", "arena", "parts", "compile")
MIB = 2**20
TIMEOUT = 900


def prepared(network: str, batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The network in eval mode, and a batch for it, the same in each process."""
    torch.manual_seed(0)
    model, sample = NETWORKS[network]()
    return model.eval(), tuple(torch.randn(batch, *x.shape[1:]) for x in sample)


def way_to_run(
    way: str, model: nn.Module, inputs: tuple[Tensor, ...], parts: int
) -> tuple[Callable[..., Any], MemoryTable | None]:
    """What to call, and what the plan says."""
    if way == "eager":
        return model, torchtrim.count_memory(model, inputs)
    if way == "compile":
        return torch.compile(model), None
    fitted = torchtrim.optimize_memory(
        model,
        inputs,
        reuse_buffers=way != "release",
        split_batch=parts if way == "parts" else 1,
        verify=False,
    )
    return model, fitted.after


def child(network: str, batch: int, way: str, parts: int) -> dict[str, Any]:
    """One way, measured here."""
    torch.set_num_threads(1)
    model, inputs = prepared(network, batch)
    begin = time.perf_counter()
    call, plan = way_to_run(way, model, inputs, parts)
    with torch.no_grad():
        if way == "compile":
            call(*inputs)
        planning = time.perf_counter() - begin
        allocator = CpuAllocator()
        allocator.start()
        result = call(*inputs)
        watched = allocator.stop()
        digest = digest_of(result)
        del result
        before = reset_resident()
        begin = time.perf_counter()
        call(*inputs)
        seconds = time.perf_counter() - begin
        rose = resident("VmHWM") - before
    return {
        "way": way,
        "outputs_mib": None if plan is None else round(plan.outputs / MIB, 2),
        "workspace_mib": None if plan is None else round(plan.workspace / MIB, 2),
        "allocated_mib": round(watched.peak / MIB, 2),
        "process_mib": round(rose / MIB, 1),
        "seconds": round(seconds, 3),
        "planning_seconds": round(planning, 1),
        "digest": digest,
    }


def training_child(network: str, batch: int, way: str) -> dict[str, Any]:
    """One way to train, measured here."""
    torch.set_num_threads(1)
    model, inputs = prepared(network, batch)
    model.train()
    begin = time.perf_counter()
    if way == "train planned":
        fitted = torchtrim.optimize_memory(model, inputs, "training", verify=False)
        table = fitted.after
    else:
        table = torchtrim.count_memory(model, inputs, "training")
    planning = time.perf_counter() - begin
    step, allocator = step_of(model, inputs), CpuAllocator()
    allocator.start()
    begin = time.perf_counter()
    step.step(0)
    seconds = time.perf_counter() - begin
    measured = allocator.stop().peak + table.parameters + table.buffers
    return {
        "way": way,
        "total_mib": round(table.total / MIB, 1),
        "measured_mib": round(measured / MIB, 1),
        "off_by_percent": round(100 * (measured / table.total - 1), 2),
        "seconds": round(seconds, 2),
        "planning_seconds": round(planning, 1),
        "digest": digest_of([*model.parameters(), *model.buffers()]),
    }


def measure_training(network: str) -> dict[str, Any]:
    """Both ways to train a network, beside OptNet's figures."""
    before, after = TRAINING[network]
    ways = [in_child(network, TRAINING_BATCH, way, 1) for way in TRAINING_WAYS]
    reference = ways[0].get("digest")
    for one in ways:
        digest = one.pop("digest", None)
        one["equal"] = digest == reference if digest else None
        if "measured_mib" in one:
            one["saved_percent"] = round(100 * (1 - one["measured_mib"] / before), 1)
    return {
        "network": network,
        "batch": TRAINING_BATCH,
        "optnet_mib": {"before": before, "after": after},
        "optnet_saved_percent": round(100 * (1 - after / before), 1),
        "ways": ways,
    }


def digest_of(result: Any) -> str:
    """Of every bit of the results."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors_in(result):
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def resident(name: str) -> int:
    """A line of Linux's account of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def reset_resident() -> int:
    """Let the highest resident memory begin again; what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def measure(network: str, batch: int, ways: list[str], parts: int) -> dict[str, Any]:
    """All ways of one network at one size."""
    found: dict[str, Any] = {"network": network, "batch": batch, "parts": parts}
    if batch == 128 and network in OPTNET:
        found["optnet_mib"] = dict(zip(("before", "after"), OPTNET[network], strict=True))
        found["goal_mib"] = GOALS[network]
    model, inputs = prepared(network, batch)
    found["made_mib"] = round(torchtrim.count_memory(model, inputs).made / MIB, 1)
    del model, inputs
    found["ways"] = [in_child(network, batch, way, parts) for way in ways]
    reference = found["ways"][0].get("digest")
    for one in found["ways"]:
        digest = one.pop("digest", None)
        one["equal"] = digest == reference if digest else None
        if one.get("outputs_mib") and one["way"] != "eager":
            plan = one["outputs_mib"] + one["workspace_mib"]
            one["off_by_percent"] = round(100 * (one["allocated_mib"] - plan) / plan, 2)
    return found


def in_child(network: str, batch: int, way: str, parts: int) -> dict[str, Any]:
    """One way in a process of its own."""
    command = [sys.executable, "-m", "bench.optnet", network]
    command += ["--batch", str(batch), "--parts", str(parts), "--child", way]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return {"way": way, "failed": f"no result in {TIMEOUT} s"}
    if done.returncode:
        return {"way": way, "failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", default=[])
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 1])
    parser.add_argument("--parts", type=int, default=16)
    parser.add_argument("--compile", action="store_true", help="torch.compile too")
    parser.add_argument("--no-training", action="store_true", help="only calls")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--save", action="store_true", help="keep it in bench/results")
    parser.add_argument("--child", choices=(*WAYS, *TRAINING_WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child in TRAINING_WAYS:
        print(json.dumps(training_child(options.networks[0], options.batch[0], options.child)))
        return
    if options.child:
        print(
            json.dumps(child(options.networks[0], options.batch[0], options.child, options.parts))
        )
        return
    found = []
    for network in options.networks or list(OPTNET):
        for batch in options.batch:
            ways = [
                w
                for w in WAYS
                if (w != "parts" or batch > 1) and (w != "compile" or options.compile)
            ]
            found.append(measure(network, batch, ways, options.parts))
            if not options.json:
                show(found[-1])
    training = []
    for network in [] if options.no_training else options.networks or list(OPTNET):
        training.append(measure_training(network))
        if not options.json:
            show_training(training[-1])
    if options.save:
        save("optnet", {"networks": found, "training": training})
    if options.json:
        everything = {"machine": facts(), "networks": found, "training": training}
        print(json.dumps(everything, indent=1))


def show(one: dict[str, Any]) -> None:
    """A line for each way."""
    optnet = one.get("optnet_mib", {})
    print(
        f"{one['network']}, batch {one['batch']}: all results {one['made_mib']} MiB;",
        f"OptNet {optnet.get('before')} -> {optnet.get('after')}; goal {one.get('goal_mib')}",
        flush=True,
    )
    for way in one["ways"]:
        print("   ", " ".join(f"{key} {value}" for key, value in way.items()), flush=True)


def show_training(one: dict[str, Any]) -> None:
    """A line for each way to train."""
    optnet = one["optnet_mib"]
    print(
        f"{one['network']}, training at batch {one['batch']}: OptNet {optnet['before']} ->",
        f"{optnet['after']} MiB, {one['optnet_saved_percent']} % saved",
        flush=True,
    )
    for way in one["ways"]:
        print("   ", " ".join(f"{key} {value}" for key, value in way.items()), flush=True)


if __name__ == "__main__":
    main()
