"""Whether a certificate ever calls a sound plan unequal: techniques on models, programs beside themselves.

python -m bench.clean_pairs [MODEL ...] [--seeds 3] [--scripts 24] [--only TECHNIQUE] [--cost] [--json]

A pair is a model of `bench.clean` with an optimizer, and a plan of one technique: the smallest peak that it
reaches, and one or two on the way there; places drawn at random where it lowers no peak alone. A verdict
weaker than the plan's own equivalence is a false alarm. Programs of `cases/faulty` stand beside copies of
themselves, which save and load on the way; those of `cases/faulty/varying` vary from run to run, and every
verdict on them but UNDECIDED is wrong. A plan that this model refuses is no pair, and is counted apart.
Each run replaces the parts of the result that it is asked for.

`--cost`: how much more of the processor's time than the compared steps a certificate takes, its own run of
them included; and by how many times its parameters the highest resident memory grows beyond that of the
steps themselves: the slope between two sizes of a model, in a process each.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tests.cases import nets, zoo
from torch import nn

from bench.clean import MODELS, STEPS, recomputing, script, step_of
from bench.faults import PROGRAMS
from bench.machine import RESULTS, save, slug
from torchtrim.capture.workload import TrainStep
from torchtrim.errors import ApplyFailed, InfeasibleBudget, PlannedStepFailed, Unsupported
from torchtrim.executor.registry import names, technique
from torchtrim.planner.planner import Planner
from torchtrim.planner.plans import build_plan
from torchtrim.planner.variants import Planners
from torchtrim.records.budget import Budget
from torchtrim.records.plan import Plan, Prediction, Technique
from torchtrim.records.profile import Profile
from torchtrim.records.terms import Terms
from torchtrim.records.trial import Request
from torchtrim.step.from_profile import step_of as step_at
from torchtrim.workflows.optimize.fitting import Fitting

_WEAKER = {
    "BITWISE": ("ROUNDING", "NOT EQUAL", "UNDECIDED"),
    "ROUNDING": ("NOT EQUAL", "UNDECIDED"),
}
ROUNDS = 3
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


class Wide(nn.Module):
    """Parameters that are large for what is computed with them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(width, 64)
        self.head = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.embed(rows))
        return result


def memory(width: int, kind: str) -> dict[str, int]:
    """Resident bytes at most, of plain steps, and of a certificate in this process after them."""
    torch.manual_seed(0)
    model = Wide(width)
    optimizer = getattr(torch.optim, kind)(model.parameters(), 0.1)
    batch = torch.randint(width, (16, 32))
    step = TrainStep(model, lambda model, rows: model(rows).square().mean(), optimizer, batch)
    for number in range(3):
        step.step(number)
    plain = _highest()
    fitting = Fitting(step, STEPS, lambda _: None)
    original = fitting.observe()
    plan = recomputing(random.Random(0), ["Wide.head"])
    fitting.verify(original, plan)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"parameters": parameters, "plain": plain, "certified": _highest()}


def memory_in_parameters(kind: str) -> float:
    """How many times its parameters a certificate needs beyond the step, from two sizes of a model."""
    found = []
    for width in (50_000, 400_000):
        said = subprocess.run(
            [
                sys.executable,
                "-m",
                "bench.clean_pairs",
                "--memory",
                str(width),
                "--optimizer",
                kind,
            ],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        found.append(json.loads(said.splitlines()[-1]))
    small, large = found
    beyond = [one["certified"] - one["plain"] for one in found]
    return round((beyond[1] - beyond[0]) / (large["parameters"] - small["parameters"]), 2)


def cost() -> dict[str, Any]:
    """What a certificate takes of the processor and of memory."""
    torch.manual_seed(0)
    model = nets.Encoder()
    batch = zoo.tokens(8, 128)
    step = TrainStep(model, zoo.next_token, torch.optim.Adam(model.parameters(), 1e-3), batch)
    request = Request(steps=3)
    for number in range(2):
        step.step(number)
    ratios, verdicts = [], []
    for _ in range(ROUNDS):
        begin = time.process_time()
        for number in range(request.total):
            step.step(number)
        steps = time.process_time() - begin
        fitting = Fitting(step, request, lambda _: None)
        original = fitting.observe()
        planner = fitting.planner(original, "recompute")
        plan = planner.floor_plan(Budget(1))
        begin = time.process_time()
        verdicts.append(fitting.verify(original, plan).verdict)
        ratios.append((time.process_time() - begin) / steps)
    return {
        "verdicts": verdicts,
        "of_the_steps": [round(one, 2) for one in ratios],
        "of_the_steps_median": round(statistics.median(ratios), 2),
        "memory_beyond_the_step_in_parameters": {
            kind: memory_in_parameters(kind) for kind in ("SGD", "Adam")
        },
    }


def _highest() -> int:
    """Resident bytes of this program at most, without what ran in the process before, as `ru_maxrss` has."""
    status = Path("/proc/self/status").read_text()
    (kib,) = re.findall(r"VmHWM:\s*(\d+) kB", status)
    return int(kib) * 1024


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
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--memory", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--optimizer", default="SGD", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="write the result")
    options = parser.parse_args()
    if options.memory:
        print(json.dumps(memory(options.memory, options.optimizer)))
        return
    parts: dict[str, Any] = {}
    costs: dict[str, Any] = {}
    if options.cost:
        costs = cost()
        print(costs, flush=True)
    for model in options.models:
        techniques = [options.only] if options.only else sound()
        parts[model] = of_model(model, range(options.seeds), techniques)
        print(model, parts[model], flush=True)
    if options.scripts:
        parts["beside itself"] = beside_themselves(options.scripts)
        print(parts["beside itself"], flush=True)
    path = RESULTS / slug() / "clean_pairs.json"
    found = json.loads(path.read_text()) if options.json and path.exists() else {}
    parts, costs = found.get("parts", {}) | parts, costs or found.get("cost", {})
    print(summary(parts))
    if options.json:
        print(save("clean_pairs", {**summary(parts), "cost": costs, "parts": parts}))


if __name__ == "__main__":
    main()
