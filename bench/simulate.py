"""What the simulator says of a planned step against what is measured, at the first plan.

    python -m bench.simulate [examples] [gans] [own] ["held out"] [calibration] [optnet] [--bytes]
    python -m bench.simulate "held out: opt" "calibration: densenet121" [--bytes]

Each step is recorded once, planned at several shares of its peak without any correction, and run as planned.
`examples` are the scripts of `bench.budgets`, `own`, `held out` and `calibration` the models of
`bench.estimates` (the last two want torchvision, timm and transformers), `optnet` the networks of
`bench.optnet` with a small batch, `gans` steps in which one discriminator is called three times. Bytes are
exact on any machine; times want a quiet one. With `--bytes` each plan runs once, and
the result is `simulate-bytes.json`, whose times say nothing.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from typing import Any

import torch
from tests.cases import zoo
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from bench.examples import NAMES, script
from bench.machine import RESULTS, save, slug
from bench.optnet import OPTNET, prepared
from torchtrim import Script, TrainStep
from torchtrim.records.budget import Budget
from torchtrim.records.trial import Request, Trial
from torchtrim.workflows.live_model import step_of as network_step
from torchtrim.workflows.optimize.fitting import Fitting

SHARES = (0.85, 0.7, 0.55, 0.4)
APART = 0.1
NETWORK_BATCH = 8
STEPS, ROUNDS = 5, 3
Work = Callable[[], Script | TrainStep]


class Gan(nn.Module):
    """A generator, and a discriminator that sees real, detached and generated images in one step."""

    def __init__(self, width: int, activation: Callable[[], nn.Module], norm: bool) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(32, 4 * width, 4),
            *self._part(activation, 4 * width, norm),
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1),
            *self._part(activation, 2 * width, norm),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            *self._part(activation, width, norm),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1),
            activation(),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            *self._part(activation, 2 * width, norm),
            nn.Conv2d(2 * width, 4 * width, 4, 2, 1),
            *self._part(activation, 4 * width, norm),
            nn.Conv2d(4 * width, 1, 4),
        )

    @staticmethod
    def _part(activation: Callable[[], nn.Module], width: int, norm: bool) -> list[nn.Module]:
        return [*([nn.BatchNorm2d(width)] if norm else []), activation()]

    def forward(self, batch: Any) -> torch.Tensor:
        """The losses of both, as one."""
        real, noise = batch
        fake = self.generator(noise)
        seen = [self.discriminator(images).flatten() for images in (real, fake.detach(), fake)]
        wanted = (torch.ones_like(seen[0]), torch.zeros_like(seen[1]), torch.ones_like(seen[2]))
        return torch.stack([cross_entropy(a, b) for a, b in zip(seen, wanted, strict=True)]).sum()


def gan(width: int, activation: Callable[[], nn.Module], norm: bool, kind: str) -> Work:
    """A step of such a network."""

    def make() -> TrainStep:
        model = Gan(width, activation, norm)
        optimizer = getattr(torch.optim, kind)(model.parameters(), 1e-3)
        batch = torch.randn(64, 3, 32, 32), torch.randn(64, 32, 1, 1)
        return TrainStep(model, lambda net, given: net(given), optimizer, batch)

    return make


def trained(make: zoo.Maker) -> Work:
    """A step of a model of the zoo with Adam."""

    def step() -> TrainStep:
        sample = make()
        optimizer = torch.optim.Adam(sample.model.parameters(), 1e-4)
        return TrainStep(sample.model.train(), sample.loss, optimizer, sample.batch)

    return step


def network(name: str) -> Work:
    """A forward and backward of one of OptNet's networks."""

    def make() -> TrainStep:
        model, inputs = prepared(name, NETWORK_BATCH)
        return network_step(model.train(), inputs)

    return make


def works(part: str) -> dict[str, Work]:
    """The steps of a part, by name."""
    if part == "examples":
        return {name: (lambda name=name: script(name)) for name in NAMES}  # type: ignore[misc]
    if part == "gans":
        return {
            "gan, ReLU, norms": gan(16, nn.ReLU, True, "Adam"),
            "gan, LeakyReLU, norms": gan(32, lambda: nn.LeakyReLU(0.2), True, "Adam"),
            "gan, LeakyReLU": gan(24, lambda: nn.LeakyReLU(0.2), False, "SGD"),
            "gan, SiLU, norms": gan(16, nn.SiLU, True, "RMSprop"),
        }
    if part == "optnet":
        return {name: network(name) for name in OPTNET}
    return {name: trained(make) for name, make in zoo.SETS[part].items()}


def points(work: Script | TrainStep, *, timed: bool) -> Iterator[dict[str, Any]]:
    """The step as it is, and planned for each share that the simulator says can be reached."""
    fitting = Fitting(work, Request(steps=STEPS), lambda _: None)
    original = fitting.observe()
    planner = fitting.planner(original)
    bias = original.peak_bytes - planner.simulated_original
    floor = planner.floor.outcome.peak_bytes + bias
    plans = {}
    for share in (*SHARES, floor / original.peak_bytes):
        plan = planner.plan(Budget(max(int(original.peak_bytes * share), floor), bias=bias))
        places = tuple((one.name, one.where) for one in plan.techniques)
        if places:
            plans.setdefault(places, (share, plan))
    trials = [fitting.run_planned(plan) for _, plan in plans.values()]
    runs = [
        lambda: Fitting(work, Request(steps=STEPS), lambda _: None).observe(),
        *(partial(fitting.run_planned, plan) for _, plan in plans.values()),
    ]
    once = [original.seconds, *(trial.seconds for trial in trials)]
    seconds = interleaved(runs) if timed else once
    yield {
        "share": 1.0,
        "measured_bytes": original.peak_bytes,
        "simulated_bytes": planner.simulated_original,
        "floor_bytes": floor,
        "predicted_seconds": original.seconds,
        "measured_seconds": seconds[0],
    }
    for (share, plan), planned, median in zip(plans.values(), trials, seconds[1:], strict=True):
        yield {
            "share": round(share, 3),
            "predicted_bytes": plan.predicted.peak_bytes,
            "measured_bytes": planned.peak_bytes,
            "predicted_seconds": plan.predicted.step_seconds,
            "measured_seconds": median,
            "places": sum(len(one.where) for one in plan.techniques),
            "gap": plan.gap,
        }


def interleaved(runs: list[Callable[[], Trial]]) -> list[float]:
    """The median step of each over some rounds in random order, so that all meet the same machine."""
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(ROUNDS):
        for number in random.sample(range(len(runs)), len(runs)):
            seconds[number].append(runs[number]().seconds)
    return [statistics.median(one) for one in seconds]


def longer(one: dict[str, Any], way: str) -> float:
    """By what factor a plan's step is longer than the original's, as `way` says."""
    return one[f"{way}_seconds"] / one["original"][f"{way}_seconds"]


def summary(steps: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What the goals are about. Times are compared as factors of the original's in the same rounds; the order
    counts pairs of plans of one step that are apart in time."""
    planned = [[{**one, "original": first} for one in rest] for first, *rest in steps.values()]
    plans = [one for several in planned for one in several]
    bytes_off = [abs(p["predicted_bytes"] / p["measured_bytes"] - 1) for p in plans]
    time_off = [abs(longer(p, "predicted") / longer(p, "measured") - 1) for p in plans]
    right = [
        (one["predicted_seconds"] < other["predicted_seconds"])
        == (one["measured_seconds"] < other["measured_seconds"])
        for several in planned
        for one, other in combinations(several, 2)
        if abs(one["measured_seconds"] / other["measured_seconds"] - 1) > APART
    ]
    return {
        "steps": len(steps),
        "plans": len(plans),
        "bytes_off_median": statistics.median(bytes_off) if bytes_off else None,
        "bytes_off_worst": max(bytes_off, default=None),
        "seconds_off_median": statistics.median(time_off) if time_off else None,
        "order_right": sum(right) / len(right) if right else None,
        "pairs": len(right),
    }


def main() -> None:
    """Run the named parts or steps, or those that need no other library; keep the results of the others."""
    timed = "--bytes" not in sys.argv
    result = "simulate" if timed else "simulate-bytes"
    path = RESULTS / slug() / f"{result}.json"
    steps = json.loads(path.read_text())["steps"] if path.exists() else {}
    wanted = [one for one in sys.argv[1:] if one != "--bytes"] or ["gans", "own", "examples"]
    if any(one.startswith(("calibration", "held out")) for one in wanted):
        zoo.import_libraries()
    for part, _, only in (one.partition(": ") for one in wanted):
        for name, make in works(part).items():
            if only not in ("", name):
                continue
            torch.manual_seed(0)
            try:
                steps[f"{part}: {name}"] = list(points(make(), timed=timed))
            except Exception as error:
                steps.pop(f"{part}: {name}", None)
                print(f"{part}: {name}: {type(error).__name__}: {error}", flush=True)
                continue
            gc.collect()
            print(part, name, *steps[f"{part}: {name}"][1:], sep="\n  ", flush=True)
            save(result, {"summary": summary(steps), "steps": steps})
    print(json.dumps(summary(steps), indent=1))


if __name__ == "__main__":
    main()
