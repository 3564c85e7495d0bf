"""Decoders of 70 billion parameters over 64 devices: planned from fake tensors, beside what was measured.

    python -m bench.large [NAME ...] [--save]

Each published row is a layout of its own, one stage and 64 shards with recomputation; it is simulated as it
was run, and the plan may choose any other. Seconds are of the devices' full rates, so what is simulated is
quicker than what was measured: the ratio is the error that is stated.

Published: torchtitan, docs/performance.md at its release of Llama 3 (FSDP2, local batch 1, full activation
checkpointing, 64 A100 of 80 GB: 331 words a second and GPU, 51.7 % of the peak); MosaicML's llm-foundry,
scripts/train/benchmarking/README.md at 061f2c7 (FSDP, micro-batch 8, 4 accumulated, activation checkpointing:
410 tokens a second and GPU on 64 A100 of 80 GB joined by 1,600 Gb/s a node, 1,039 on 64 H100 of 80 GB).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bench import llama, machine
from torchtrim import TrainStep
from torchtrim.planner.stages.spread import Fabric, RankLayout, describe
from torchtrim.workflows.estimate import spread_over

DEVICES = 64
MEMORY = "80GB"
A100 = Fabric(inside=300e9, between=25e9)
H100 = Fabric(inside=450e9, between=50e9)


class Published(NamedTuple):
    """A measurement: the model, its sequences, the layout, and tokens a second and device."""

    make: Callable[[], TrainStep]
    device: str
    fabric: Fabric
    length: int
    batch: int
    layout: RankLayout
    tokens: float
    source: str


def llama_70b() -> TrainStep:
    """Llama 3 of 70 billion parameters, sequences of 8,192."""
    return _step(llama.Llama(128_256, 8192, 80, 64, 8, 28_672), 128_256, 8192)


def mpt_70b() -> TrainStep:
    """As many parameters and operations as MPT-70B, sequences of 2,048."""
    return _step(llama.Llama(50_368, 8192, 80, 64, 64, 21_845), 50_368, 2048)


def _step(model: llama.Llama, words: int, length: int) -> TrainStep:
    model = model.bfloat16()
    ids = torch.randint(words, (1, length + 1))
    return TrainStep(model, llama.loss, torch.optim.AdamW(model.parameters()), ids)


def _sharded(samples: int, microbatches: int) -> RankLayout:
    return RankLayout(1, 1, DEVICES, samples, microbatches, True, True)


CASES = {
    "torchtitan, Llama 3 70B, A100": Published(
        llama_70b, "a100", A100, 8192, 64, _sharded(1, 1), 331, "torchtitan docs/performance.md"
    ),
    "llm-foundry, MPT 70B, A100": Published(
        mpt_70b, "a100", A100, 2048, 2048, _sharded(8, 4), 410, "llm-foundry 061f2c7"
    ),
    "llm-foundry, MPT 70B, H100": Published(
        mpt_70b, "h100", H100, 2048, 2048, _sharded(8, 4), 1039, "llm-foundry 061f2c7"
    ),
}


def planned(case: Published) -> dict[str, Any]:
    """What is planned, how long that took, and the published layout as simulated."""
    began, worked = time.perf_counter(), time.process_time()
    options: dict[str, Any] = {
        "batch": case.batch,
        "device": case.device,
        "fabric": case.fabric,
    }
    found = spread_over(case.make, DEVICES, memory=MEMORY, **options)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - worked
    (theirs,) = spread_over(case.make, DEVICES, memory="1TB", layouts=[case.layout], **options)

    def tokens(step: float) -> float:
        return case.length * case.batch / step / DEVICES

    rows = [
        {
            "layout": describe(one.layout),
            "tokens_per_second": round(tokens(one.seconds)),
            "peak_bytes": one.peak_bytes,
            "bubble": round(one.bubble, 3),
            "exposed": round(one.exposed, 3),
        }
        for one in found[:5]
    ]
    return {
        "plan_seconds": round(seconds, 1),
        "plan_cpu_seconds": round(cpu_seconds, 1),
        "layouts_that_fit": len(found),
        "best": rows,
        "published": {
            "source": case.source,
            "layout": describe(case.layout),
            "tokens_per_second": case.tokens,
            "simulated_tokens_per_second": round(tokens(theirs.seconds)),
            "simulated_over_measured": round(tokens(theirs.seconds) / case.tokens, 2),
            "simulated_peak_bytes": theirs.peak_bytes,
            "rank_of_layout": sum(one.seconds < theirs.seconds for one in found) + 1,
        },
    }


def main() -> None:
    """Plan what was asked for, print it, and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all of them by default")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name, case in CASES.items():
        if not options.names or name in options.names:
            found[name] = planned(case)
            print(name, found[name], flush=True)
    if options.save:
        machine.save("large", {"cases": found})


if __name__ == "__main__":
    main()
