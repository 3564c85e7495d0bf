"""Whether a certificate ever calls a sound plan unequal: techniques on models, programs beside themselves.

python -m bench.clean_pairs [--pairs 300] [--scripts 24] [--only TECHNIQUE] [--json]

A pair is a model of `bench.clean` with an optimizer, and a plan of one technique: the smallest peak that it
reaches, and one or two on the way there; places drawn at random where it lowers no peak alone. A verdict
weaker than the plan's own equivalence is a false alarm. Programs of `bench/faulty` stand beside copies of
themselves, which save and load on the way. A plan that this model refuses is no pair, and is counted apart.

`cost`: how much longer than the compared steps a certificate takes, its own run of them included; and the
highest resident memory beyond that of the steps themselves, in shares of the parameters' bytes.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench import nets, zoo
from bench.clean import MODELS, STEPS, script, step_of
from bench.faults import PROGRAMS
from bench.machine import save
from torchtrim.errors import ApplyFailed, InfeasibleBudget, PlannedStepFailed, Unsupported
from torchtrim.loops.optimize import Fitting
from torchtrim.observe.workload import TrainStep
from torchtrim.planner.planner import Planner
from torchtrim.planner.plans import made_plan
from torchtrim.records.plan import Plan, Prediction, Technique
from torchtrim.records.profile import Profile
from torchtrim.records.trial import Request
from torchtrim.step.from_profile import step_of as step_at
from torchtrim.techniques.base import names, technique

_WEAKER = {
    "BITWISE": ("ROUNDING", "NOT EQUAL", "UNDECIDED"),
    "ROUNDING": ("NOT EQUAL", "UNDECIDED"),
}
_KNOWN = (ApplyFailed, PlannedStepFailed, InfeasibleBudget, Unsupported)


def plans(planner: Planner, peak: int) -> Iterator[Plan]:
    """Up to three plans: for the floor, and for two budgets above it."""
    bias = peak - planner.simulated_original
    floor = planner.floor.outcome.peak_bytes + bias
    seen: set[tuple[Any, ...]] = set()
    for share in (0.0, 0.4, 0.8):
        budget = floor + int(share * (peak - floor))
        plan = planner.plan(budget, bias=bias)
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
        yield made_plan(
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


def all_pairs(wanted: int, only: list[str], rows: dict[str, Counter[str]]) -> list[dict[str, Any]]:
    """Fill the rows until there are so many pairs; the false alarms."""
    alarms: list[dict[str, Any]] = []
    total = seed = 0
    while total < wanted and seed < 12:
        for model in MODELS:
            fitting = Fitting(step_of(model, seed), STEPS, lambda _: None, allow="ROUNDING")
            for name in only:
                for verdict, equivalence in pairs(fitting, name):
                    rows.setdefault(name, Counter())[verdict] += 1
                    total += verdict != "refused"
                    if verdict in _WEAKER[equivalence]:
                        alarms.append(
                            {"model": model, "technique": name, "seed": seed, "verdict": verdict}
                        )
            print(total, model, {name: dict(row) for name, row in rows.items()}, flush=True)
        seed += 1
    return alarms


def cost() -> dict[str, float]:
    """What a certificate takes of time and memory, of a model that is large enough for that to be seen."""
    torch.manual_seed(0)
    model = nets.Encoder()
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    batch = zoo.tokens(8, 128)
    step = TrainStep(model, zoo.next_token, torch.optim.Adam(model.parameters(), 1e-3), batch)
    request = Request(steps=3)
    for number in range(2):
        step.step(number)
    begin = time.perf_counter()
    for number in range(request.total):
        step.step(number)
    steps = time.perf_counter() - begin
    plain = _highest()
    fitting = Fitting(step, request, lambda _: None)
    begin = time.perf_counter()
    original = fitting.observe()
    planner = fitting.planner(original, "recompute")
    plan = planner.plan(planner.floor.outcome.peak_bytes, bias=0)
    searched = time.perf_counter()
    certificate = fitting.verify(original, plan)
    taken = time.perf_counter() - searched
    return {
        "verdict": certificate.verdict,
        "steps_seconds": round(steps, 3),
        "certificate_seconds": round(taken, 3),
        "of_the_steps": round(taken / steps, 2),
        "parameters": parameters,
        "memory_beyond_the_step_in_parameters": round((_highest() - plain) / parameters, 2),
    }


def _highest() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Try pairs, and count the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--scripts", type=int, default=24)
    parser.add_argument("--only", default="", help="a technique")
    parser.add_argument("--json", action="store_true", help="write the result")
    options = parser.parse_args()
    found = {"cost": cost()}
    print(found["cost"], flush=True)
    rows: dict[str, Counter[str]] = {}
    alarms = all_pairs(options.pairs, [options.only] if options.only else names(), rows)
    programs = sorted(PROGRAMS.glob("*.py"))
    for number in range(options.scripts):
        path: Path = programs[number % len(programs)]
        verdict = script(path, number)
        rows.setdefault("beside itself", Counter())[verdict] += 1
        if verdict != "BITWISE":
            alarms.append({"model": path.name, "technique": "", "seed": number, "verdict": verdict})
    whole = sum(rows.values(), Counter())
    print(dict(whole), "false alarms:", alarms)
    if options.json:
        verdicts = {name: dict(row) for name, row in rows.items()}
        count = whole.total() - whole["refused"]
        figures = {"pairs": count, "false_alarms": alarms, "verdicts": dict(whole)}
        print(save("clean_pairs", {**figures, "of": verdicts, **found}))


if __name__ == "__main__":
    main()
