"""What the integer program adds to the local search: how much quicker plans are, and the gap that is left.

    python -m bench.proofs [own] [calibration] ["held out"]

Each model of `bench.estimates` is recorded once (the last two sets want torchvision, timm and transformers),
and planned for seven budgets between its floor and its peak, by the local search alone and with HiGHS. Added
seconds are modelled, so that the machine's load does not matter; those of planning are the processor's.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from typing import Any
from unittest import mock

import torch
from tests.cases import zoo

from bench.machine import RESULTS, save, slug
from bench.simulate import trained
from torchtrim.planner import planner as planning
from torchtrim.planner.planner import Planner
from torchtrim.records.budget import Budget
from torchtrim.records.trial import Request, Trial
from torchtrim.workflows.optimize.fitting import Fitting

BUDGETS = 7


def points(original: Trial, low: int) -> dict[str, Any]:
    """Added seconds, bounds and planning time at budgets between `low` and the original's peak."""
    assert original.profile is not None
    began = time.process_time()
    planner = Planner(original.profile, step_seconds=original.seconds, fingerprint={})
    high = planner.simulated_original
    plans = [
        planner.plan(Budget(low + (high - low) * k // (BUDGETS + 1))) for k in range(1, BUDGETS + 1)
    ]
    return {
        "added": [plan.predicted.step_seconds - original.seconds for plan in plans],
        "gap": [plan.gap for plan in plans],
        "planning_seconds": time.process_time() - began,
    }


def measured(make: zoo.Maker) -> dict[str, Any]:
    """One model, planned both ways."""
    original = Fitting(trained(make)(), Request(steps=2), lambda _: None).observe()
    assert original.profile is not None
    proven = Planner(original.profile, step_seconds=original.seconds, fingerprint={})
    floor = proven.floor.outcome.peak_bytes
    with mock.patch.object(planning, "find_spec", return_value=None):
        plain = Planner(original.profile, step_seconds=original.seconds, fingerprint={})
        low = plain.floor.outcome.peak_bytes
        local = points(original, low)
    return {
        "peak_bytes": proven.simulated_original,
        "floor_bytes": floor,
        "local_floor_bytes": low,
        "step_seconds": original.seconds,
        "local": local,
        "proven": points(original, low),
    }


def summary(models: dict[str, Any]) -> dict[str, Any]:
    """Over all models and budgets. `quicker`: by what share of the added time proven plans are."""
    pairs = [
        (found, proven)
        for one in models.values()
        for found, proven in zip(one["local"]["added"], one["proven"]["added"], strict=True)
        if found > 0
    ]
    quicker = [1 - proven / found for found, proven in pairs]
    gaps = {way: [g for m in models.values() for g in m[way]["gap"]] for way in ("local", "proven")}
    return {
        "models": len(models),
        "plans": len(pairs),
        "quicker_mean": statistics.mean(quicker),
        "quicker_most": max(quicker),
        "gap_most": {way: max(found) for way, found in gaps.items()},
        "gap_median": {way: statistics.median(found) for way, found in gaps.items()},
        "planning_seconds_most": max(m["proven"]["planning_seconds"] for m in models.values()),
    }


def main() -> None:
    """Run the named sets, or that which needs no other library; keep the results of the others."""
    path = RESULTS / slug() / "proofs.json"
    models = json.loads(path.read_text())["models"] if path.exists() else {}
    parts = sys.argv[1:] or ["own"]
    if {"calibration", "held out"} & set(parts):
        zoo.import_libraries()
    for part in parts:
        for name, make in zoo.SETS[part].items():
            torch.manual_seed(0)
            try:
                models[name] = measured(make)
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                continue
            gc.collect()
            print(name, json.dumps(models[name]), flush=True)
            save("proofs", {"summary": summary(models), "models": models})
    print(json.dumps(summary(models), indent=1))


if __name__ == "__main__":
    main()
