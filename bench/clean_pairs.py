"""Whether a certificate ever calls a sound plan unequal: techniques on models, programs beside themselves.

python -m bench.clean_pairs [MODEL ...] [--seeds 3] [--scripts 24] [--only TECHNIQUE] [--json]

A pair is a model of `bench.clean` with an optimizer, and a plan of one technique: the smallest peak that it
reaches, and one or two on the way there; places drawn at random where it lowers no peak alone. A verdict
weaker than the plan's own equivalence is a false alarm. Programs of `cases/faulty` stand beside copies of
themselves, which save and load on the way; those of `cases/faulty/varying` vary from run to run, and every
verdict on them but UNDECIDED is wrong. A plan that this model refuses is no pair, and is counted apart.
Each run replaces the parts of the result that it is asked for.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.clean import MODELS, STEPS, script, step_of
from bench.faults import PROGRAMS
from bench.machine import RESULTS, save, slug
from torchtrim.errors import ApplyFailed, InfeasibleBudget, PlannedStepFailed, Unsupported
from torchtrim.executor.registry import names, technique
from torchtrim.planner.planner import Planner
from torchtrim.planner.plans import build_plan
from torchtrim.planner.variants import Planners
from torchtrim.records.budget import Budget
from torchtrim.records.plan import Plan, Prediction, Technique
from torchtrim.records.profile import Profile
from torchtrim.records.terms import Terms
from torchtrim.step.from_profile import step_of as step_at
from torchtrim.workflows.optimize.fitting import Fitting

_WEAKER = {
    "BITWISE": ("ROUNDING", "NOT EQUAL", "UNDECIDED"),
    "ROUNDING": ("NOT EQUAL", "UNDECIDED"),
}
_KNOWN = (ApplyFailed, PlannedStepFailed, InfeasibleBudget, Unsupported)


def plans(planner: Planner | Planners, peak: int) -> Iterator[Plan]:
    """Up to three plans: for the floor, and for two budgets above it."""
    bias = peak - planner.simulated_original
    floor = planner.floor_plan(Budget(1, bias=bias)).predicted.peak_bytes
    seen: set[tuple[Any, ...]] = set()
    for share in (0.0, 0.4, 0.8):
        budget = floor + int(share * (peak - floor))
        plan = planner.plan(Budget(budget, bias=bias))
        key = tuple((one.name, one.where) for one in plan.techniques)
        if key and key not in seen:
            seen.add(key)
            yield plan


def drawn(profile: Profile, name: str, rng: random.Random) -> Iterator[Plan]:
    """A plan of one place of a technique, and one of several, whether they save anything or not."""
    options = list(technique(name).options(step_at(profile, 0.0)))
    for size in sorted({min(1, len(options)), min(3, len(options))} - {0}):
        techniques = tuple(
            Technique(
                name=name,
                where=(one.where,),
                options=dict(one.settings),
                equivalence=one.equivalence or technique(name).equivalence,
            )
            for one in rng.sample(options, size)
        )
        yield build_plan(
            "",
            fingerprint={},
            techniques=techniques,
            predicted=Prediction(peak_bytes=0, step_seconds=0.0),
            budget_bytes=1,
        )


def pairs(fitting: Fitting, name: str) -> Iterator[tuple[str, str]]:
    """The verdict on each plan of one technique for one model, and the equivalence that it may have."""
    original = fitting.observe()
    assert original.profile is not None
    found = list(plans(fitting.planner(original, name), original.peak_bytes))
    rng = random.Random(f"{name}/{original.profile.peak_bytes}")
    for plan in found or drawn(original.profile, name, rng):
        wanted = [one.equivalence for one in plan.techniques]
        try:
            verdict = fitting.verify(original, plan).verdict
        except _KNOWN:
            verdict = "refused"
        yield verdict, "ROUNDING" if "ROUNDING" in wanted else "BITWISE"


def sound() -> list[str]:
    """Techniques that keep the function: a SEMANTIC one is not compared with the original."""
    return [name for name in names() if technique(name).equivalence != "SEMANTIC"]


def of_model(model: str, seeds: range, only: list[str]) -> dict[str, Any]:
    """The verdicts on plans of one model, by technique, and the false alarms."""
    rows: dict[str, Counter[str]] = {}
    alarms: list[dict[str, Any]] = []
    began = time.process_time()
    for seed in seeds:
        fitting = Fitting(step_of(model, seed), STEPS, lambda _: None, Terms(allow="ROUNDING"))
        for name in only:
            for verdict, equivalence in pairs(fitting, name):
                rows.setdefault(name, Counter())[verdict] += 1
                if verdict in _WEAKER[equivalence]:
                    alarms.append({"technique": name, "seed": seed, "verdict": verdict})
    return _row(rows, alarms, began)


def beside_themselves(count: int) -> dict[str, Any]:
    """The verdicts on programs beside copies of themselves; of those that vary it must be UNDECIDED."""
    rows: dict[str, Counter[str]] = {}
    alarms: list[dict[str, Any]] = []
    began = time.process_time()
    programs = [*sorted(PROGRAMS.glob("*.py")), *sorted((PROGRAMS / "varying").glob("*.py"))]
    for number in range(count):
        path: Path = programs[number % len(programs)]
        verdict = script(path, number)
        rows.setdefault(path.stem, Counter())[verdict] += 1
        if verdict != ("UNDECIDED" if path.parent.name == "varying" else "BITWISE"):
            alarms.append({"program": path.name, "seed": number, "verdict": verdict})
    return _row(rows, alarms, began)


def _row(
    rows: dict[str, Counter[str]], alarms: list[dict[str, Any]], began: float
) -> dict[str, Any]:
    seconds = round(time.process_time() - began, 1)
    return {"of": {k: dict(v) for k, v in rows.items()}, "alarms": alarms, "cpu_seconds": seconds}


def summary(parts: dict[str, Any]) -> dict[str, Any]:
    """The figures over all parts."""
    whole: Counter[str] = Counter()
    for part in parts.values():
        for verdicts in part["of"].values():
            whole.update(verdicts)
    alarms = {name: part["alarms"] for name, part in parts.items() if part["alarms"]}
    count = whole.total() - whole["refused"]
    return {"pairs": count, "false_alarms": alarms, "verdicts": dict(whole)}


def main() -> None:
    """Try pairs, and put the verdicts beside those of other parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="of `bench.clean`")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--scripts", type=int, default=0)
    parser.add_argument("--only", default="", help="a technique")
    parser.add_argument("--json", action="store_true", help="write the result")
    options = parser.parse_args()
    path = RESULTS / slug() / "clean_pairs.json"
    found = json.loads(path.read_text()) if options.json and path.exists() else {}
    parts: dict[str, Any] = found.get("parts", {})
    for model in [*options.models, *(["beside itself"] if options.scripts else [])]:
        if model == "beside itself":
            parts[model] = beside_themselves(options.scripts)
        else:
            techniques = [options.only] if options.only else sound()
            parts[model] = of_model(model, range(options.seeds), techniques)
        print(model, parts[model], flush=True)
        if options.json:
            save("clean_pairs", {**summary(parts), "parts": parts})
    print(summary(parts))


if __name__ == "__main__":
    main()
