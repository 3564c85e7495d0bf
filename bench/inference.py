"""What `optimize_memory` brings to calls of networks from torchvision and timm, and what it takes.

    pip install --no-deps torchvision==0.28.0 timm
    python -m bench.inference [NETWORK ...]

Batches of 1 and 16. Predicted: bytes of outputs and of known workspace, by the plan, before anything has run
with it. Measured: the peak of a call over what was alive before there was a plan; and its time, ratios of
rounds in random order. Seconds are the processor's, in one thread, so that other programs disturb them
little. `promised` says that a quarter less was predicted.
"""

from __future__ import annotations

import copy
import gc
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from tests.cases import zoo
from torch import nn

import torchtrim
from bench.machine import RESULTS, save, slug, with_spread

ROUNDS, LEAST_SAVING, MOST_TIME, LONG_CALL = 7, 0.25, 1.05, 0.02
BATCHES = (1, 16)
NETWORKS: dict[str, zoo.Maker] = {
    "resnet18": zoo.vision("resnet18", 160),
    "resnet50": zoo.vision("resnet50", 160),
    "vgg11_bn": zoo.vision("vgg11_bn", 128),
    "densenet121": zoo.vision("densenet121", 128),
    "mobilenet_v3_large": zoo.vision("mobilenet_v3_large", 160),
    "squeezenet1_1": zoo.vision("squeezenet1_1", 160),
    "regnet_y_400mf": zoo.vision("regnet_y_400mf", 160),
    "efficientnet_b0": zoo.timm("efficientnet_b0", 160),
    "convnext_atto": zoo.timm("convnext_atto", 160),
    "vit_tiny_patch16_224": zoo.timm("vit_tiny_patch16_224", 224),
    "swin_tiny_patch4_window7_224": zoo.timm("swin_tiny_patch4_window7_224", 224),
    "mixer_s32_224": zoo.timm("mixer_s32_224", 224),
}


def peak(model: nn.Module, batch: torch.Tensor) -> int:
    """Bytes at the peak of a call."""
    return torchtrim.measure(_call(model, batch), warmup=1, device="cpu").peak_bytes


def _call(model: nn.Module, batch: torch.Tensor) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return model(batch)

    return call


def seconds(first: nn.Module, second: nn.Module, batch: torch.Tensor) -> list[tuple[float, float]]:
    """Of a call of each, in rounds; the first round is not counted."""
    taken = []
    for _ in range(ROUNDS + 1):
        found = {}
        for model in random.sample([first, second], 2):
            begin = time.process_time()
            _call(model, batch)()
            found[model] = time.process_time() - begin
        taken.append((found[first], found[second]))
    return taken[1:]


def measure(make: zoo.Maker, count: int) -> dict[str, Any]:
    """One network at one size of batch."""
    torch.manual_seed(0)
    sample = make()
    batch = sample.batch[0][:1].repeat(count, 1, 1, 1)
    plain, model = sample.model.eval(), copy.deepcopy(sample.model).eval()
    base = torchtrim.measure(lambda: None, device="cpu").peak_bytes
    fitted = torchtrim.optimize_memory(model, batch)
    times = seconds(plain, model, batch)
    before, after = (one.outputs + one.workspace for one in (fitted.before, fitted.after))
    row = {
        "predicted": {"before": before, "after": after, "saved": round(1 - after / before, 3)},
        "measured": {"before": peak(plain, batch) - base, "after": peak(model, batch) - base},
        "verdict": fitted.certificate.verdict if fitted.certificate else None,
        "seconds": round(sorted(a for a, _ in times)[ROUNDS // 2], 4),
        "time": with_spread([b / a for a, b in times]),
        "notes": list(fitted.notes),
    }
    row["measured"]["saved"] = round(1 - row["measured"]["after"] / row["measured"]["before"], 3)
    row["promised"] = row["predicted"]["saved"] >= LEAST_SAVING
    fitted.revert()
    return row


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How often what was promised was kept."""
    every = [row for network in rows.values() for row in network.values()]
    promised = [row for row in every if row["promised"]]
    kept = [row for row in promised if row["measured"]["saved"] >= LEAST_SAVING]
    quick = [
        row for row in kept if row["seconds"] < LONG_CALL or row["time"]["median"] <= MOST_TIME
    ]
    return {
        "calls": len(every),
        "promised": len(promised),
        "kept": len(kept),
        "kept in time": len(quick),
        "unpromised but kept": sum(
            row["measured"]["saved"] >= LEAST_SAVING for row in every if not row["promised"]
        ),
    }


def main() -> None:
    """The named networks, or all; keeps the results of the others."""
    torch.set_num_threads(1)
    zoo.import_libraries()
    path = RESULTS / slug() / "inference.json"
    rows = json.loads(path.read_text())["networks"] if path.exists() else {}
    for name in sys.argv[1:] or NETWORKS:
        rows[name] = {f"batch {count}": measure(NETWORKS[name], count) for count in BATCHES}
        print(name, json.dumps(rows[name]), flush=True)
        gc.collect()
        save("inference", {"summary": summary(rows), "networks": rows})
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
