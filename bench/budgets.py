"""Budgets of 90, 75, 60 and 50 % on the examples: what was planned, measured and proved.

    python -m bench.budgets [EXAMPLE ...]

Each point is the whole loop on the unmodified script. `binding` says that the budget is above the
smallest peak that was found, so that a plan had to fit it. Beside it stands per-block checkpointing by
exhaustive trial, where `bench.exhaustive` has measured it on this machine.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

from bench.examples import NAMES, script
from bench.machine import RESULTS, save, slug
from torchtrim import InfeasibleBudget
from torchtrim.records.budget import memory_limit
from torchtrim.records.trial import Request
from torchtrim.workflows.optimize.fitting import Fit, Fitting

SHARES = (90, 75, 60, 50)


def measure(name: str) -> dict[str, Any]:
    """All budgets on one example."""
    fitting = Fitting(script(name), Request(), lambda _: None)
    points = []
    for share in SHARES:
        try:
            point = _fitted(fitting.fit(memory_limit(f"{share}%")))
        except InfeasibleBudget as error:
            point = {"smallest_bytes": error.smallest_bytes, "set_by": error.set_by}
        points.append({"share": share, **point})
        print(name, points[-1], flush=True)
    assert fitting.original is not None
    return {"original_bytes": fitting.original.peak_bytes, "points": points}


def _fitted(fit: Fit) -> dict[str, Any]:
    assert fit.planned is not None
    assert fit.certificate is not None
    return {
        "budget_bytes": fit.budget.bytes,
        "predicted_bytes": fit.plan.predicted.peak_bytes,
        "measured_bytes": fit.planned.peak_bytes,
        "used": round(fit.planned.peak_bytes / fit.budget.bytes, 4),
        "original_seconds": fit.original.seconds,
        "predicted_seconds": fit.plan.predicted.step_seconds,
        "measured_seconds": fit.planned.seconds,
        "verdict": fit.certificate.verdict,
        "where": [where for one in fit.plan.techniques for where in one.where],
        "replanned": len(fit.notes),
    }


def summary(examples: dict[str, Any]) -> dict[str, Any]:
    """What the goals are about."""
    points = [point for one in examples.values() for point in one["points"]]
    fitted = [point for point in points if "used" in point]
    return {
        "points": len(points),
        "fitted": len(fitted),
        "within_budget": sum(p["measured_bytes"] <= p["budget_bytes"] for p in fitted),
        "bitwise": sum(p["verdict"] == "BITWISE" for p in fitted),
        "median_used": statistics.median(p["used"] for p in fitted) if fitted else None,
        "worst_prediction": max(
            (abs(p["predicted_bytes"] / p["measured_bytes"] - 1) for p in fitted), default=None
        ),
    }


def main() -> None:
    """Run the named examples, or all; keep the results of the others."""
    path = RESULTS / slug() / "budgets.json"
    examples = json.loads(path.read_text())["examples"] if path.exists() else {}
    for name in sys.argv[1:] or NAMES:
        examples[name] = measure(name)
        save("budgets", {"summary": summary(examples), "examples": examples})
    print(json.dumps(summary(examples), indent=1))


if __name__ == "__main__":
    main()
