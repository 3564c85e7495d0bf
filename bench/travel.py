"""Plans that travel: made on each device, applied on every other, and held against the unplanned run there.

    python -m bench.travel [MODEL ...]

Plans have the smallest peak that bits allow, of all techniques. A place is left where the other device runs
other kernels, which the run says; everything else applies. There the other device plans `again` for that
peak: `within` counts those that reach it. `unlike` must be 0: runs whose losses, parameters or buffers after
two steps differ from the unplanned run by a bit; `refused` and `again_wrong` too.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from bench.machine import save, saved

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from torchtrim.errors import TorchtrimError
from torchtrim.records.plan import Plan
from travelling import DEVICES, MODELS, Make, left, planned, reasons, run


def measure(name: str) -> dict[str, Any]:
    """One model on all pairs of devices."""
    make = MODELS[name]
    plain = {device: run(device, make).digest for device in DEVICES}
    plans = {device: planned(device, make) for device in DEVICES}
    found: Counter[str] = Counter()
    rows: dict[str, Any] = {}
    for here, there in itertools.permutations(DEVICES, 2):
        plan = plans[here]
        places = sum(len(one.where) for one in plan.techniques)
        found += Counter(runs=1, places=places)
        try:
            travelled = run(there, make, plan)
        except TorchtrimError as error:
            found["refused"] += 1
            rows[f"{here} to {there}"] = str(error)
            continue
        found += Counter(unlike=travelled.digest != plain[there], left=left(travelled))
        row = {"places": places, "left": left(travelled), "why": dict(reasons(travelled))}
        if row["left"]:
            row |= again(there, make, plan, plain[there])
            found += Counter(again=1, within=row["within"], again_wrong=row["again_wrong"])
        rows[f"{here} to {there}"] = row
    return {**found, "refused": found["refused"], "unlike": found["unlike"], "pairs": rows}


def again(there: str, make: Make, plan: Plan, plain: str) -> dict[str, Any]:
    """Plan again where places were left, within the plan's peak, as the command that `run` names does.

    `again_wrong`: the new plan leaves a place too, or is unlike the unplanned run.
    """
    budget, host = plan.predicted.peak_bytes, plan.predicted.host_bytes
    other = planned(there, make, budget=budget, host_bytes=host if there == "cpu" else None)
    ran = run(there, make, other)
    return {
        "peak_bytes": [budget, other.predicted.peak_bytes],
        "within": other.predicted.peak_bytes <= budget,
        "again_wrong": left(ran) > 0 or ran.digest != plain,
    }


def summary(models: dict[str, dict[str, Any]]) -> dict[str, int]:
    """The sums over all models."""
    names = ("runs", "refused", "unlike", "places", "left", "again", "within", "again_wrong")
    return {"models": len(models)} | {
        name: sum(one.get(name, 0) for one in models.values()) for name in names
    }


def main() -> None:
    """The named models, or all; keeps the results of the others."""
    models = saved("travel").get("models", {})
    for name in sys.argv[1:] or MODELS:
        models[name] = measure(name)
        print(name, models[name], flush=True)
        save("travel", {"summary": summary(models), "models": models})
    print(json.dumps(summary(models), indent=1))


if __name__ == "__main__":
    main()
