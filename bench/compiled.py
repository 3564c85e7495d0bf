"""Compiled programs: the peak simulated from Inductor's code beside the allocator's, and plans for less.

    python -m bench.compiled [MODEL ...] [--peaks | --plan | --clock]

Peaks are bytes over those before the step, of forward and backward; the model stays compiled. Each model is
planned for 70, 60 and 50 % of that. The plan for 60 % is compiled and run: its peak, and whether loss and
gradients equal those of the compiled original, bit for bit. `--plan` leaves that out, as it takes a C++
compiler minutes. `--clock` measures times as well, in rounds of random order, of the processor in one
thread, and of a compile without caches: for a quiet machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch._inductor.utils import fresh_cache

from bench.compiled_models import MODELS, OTHERS, Sample
from bench.machine import save, saved
from torchtrim.capture.allocator import CpuAllocator
from torchtrim.compiled.apply import Applied
from torchtrim.compiled.graphs import Graphs
from torchtrim.compiled.planning import GraphPlanner, SavingChoice

SHARES = (0.7, 0.6, 0.5)
RUN = 0.6
ROUNDS = 5


class Work:
    """A compiled model's step."""

    def __init__(self, name: str) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.sample: Sample = (MODELS | OTHERS)[name]()
        self._compiled = torch.compile(self.sample.model, **self.sample.options)

    def step(self) -> torch.Tensor:
        """Forward and backward from a fixed seed; gradients begin at None."""
        torch.manual_seed(1)
        self.sample.model.zero_grad()
        out = self._compiled(*self.sample.batch)
        target = self.sample.batch[1]
        loss = (
            F.cross_entropy(out.flatten(0, 1), target.flatten()) if self.sample.eager_loss else out
        )
        loss.backward()
        return loss.detach()

    def results(self) -> list[torch.Tensor]:
        """The loss, every gradient and the generator's state."""
        gradients = [one.grad for one in self.sample.model.parameters() if one.grad is not None]
        return [self.step(), *(one.clone() for one in gradients), torch.get_rng_state()]

    def peak(self) -> int:
        """The allocator's highest bytes over the start of a step."""
        for _ in range(3):
            self.sample.model.zero_grad()
            gc.collect()
            watched = CpuAllocator()
            watched.start()
            self.step()
            peak = watched.stop().peak
        return peak


def watched(name: str) -> Graphs:
    """The graphs of a model's step, without compiling their kernels."""
    work, graphs = Work(name), Graphs()
    with graphs.watched():
        for _ in range(2):
            graphs.begin()
            work.step()
    return graphs


def planned(name: str, shares: tuple[float, ...]) -> tuple[dict[str, Any], SavingChoice | None]:
    """What is simulated and planned, and the plan to run."""
    begin = time.process_time()
    planner = GraphPlanner(watched(name))
    found: dict[str, Any] = {
        "predicted": planner.own.peak_bytes,
        "saved": planner.own.saved_bytes,
        "watch_seconds": round(time.process_time() - begin, 1),
    }
    if shares:
        found["shares"] = {}
    run = None
    for share in shares:
        begin, budget = time.process_time(), int(share * planner.own.peak_bytes)
        choice = planner.plan(budget)
        row: dict[str, Any] = {"seconds": round(time.process_time() - begin, 1)}
        if choice is not None:
            row |= {
                "peak": round(choice.simulated.peak_bytes / planner.own.peak_bytes, 4),
                "saved": round(choice.simulated.saved_bytes / planner.own.peak_bytes, 4),
                "first": round(choice.first_peak / budget - 1, 4),
                "dry_compiles": choice.rounds,
            }
            run = choice if share == RUN else run
        else:
            lowest = planner.lowest.simulated.peak_bytes
            row["lowest"] = round(lowest / planner.own.peak_bytes, 4)
        found["shares"][f"{share:.0%}"] = row
    return found, run


def compiled(name: str, choice: SavingChoice | None) -> tuple[Work, int, list[torch.Tensor]]:
    """A step compiled by a plan, or as torch does, with its peak and its results."""
    with Applied(choice.graphs).installed() if choice else nullcontext():
        work = Work(name)
        work.step()
    return work, work.peak(), work.results()


def measured(
    name: str, found: dict[str, Any], choice: SavingChoice | None, *, clocks: bool
) -> None:
    """Compile and run the original and the plan, and note what was measured."""
    begin = time.perf_counter()
    with fresh_cache() if clocks else nullcontext():
        original, peak, results = compiled(name, None)
    found |= {"measured": peak, "off": round(found["predicted"] / peak - 1, 5)}
    if clocks:
        found["compile_seconds"] = round(time.perf_counter() - begin, 1)
    if choice is None:
        return
    work, peak, others = compiled(name, choice)
    same = [torch.equal(a, b) for a, b in zip(results, others, strict=True)]
    found["run"] = {
        "share": RUN,
        "peak": peak,
        "off": round(choice.simulated.peak_bytes / peak - 1, 5),
        "bitwise": all(same),
        "loss_bitwise": same[0],
        "furthest": max(map(_far, results[:-1], others[:-1])),
    }
    if clocks:
        found["run"]["time"] = timed(original.step, work.step)


def _far(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(f"{((one - other).norm() / one.norm().clamp_min(1e-30)).item():.2g}")


def timed(original: Callable[[], Any], plan: Callable[[], Any]) -> dict[str, float]:
    """The planned step's processor time as a share of the original's: median and spread of rounds."""
    ratios = []
    for _ in range(ROUNDS):
        taken = {}
        for step in random.sample([original, plan], 2):
            step()
            begin = time.process_time()
            step()
            taken[step] = time.process_time() - begin
        ratios.append(taken[plan] / taken[original])
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"median": round(middle, 3), "spread": round((high - low) / 2, 3)}


def summary(models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the goals are about, of the twelve models."""
    rows = [models[name] for name in MODELS if name in models]
    planned_rows = [row for row in rows if "shares" in row]
    off = [abs(row["off"]) for row in rows if "off" in row]
    first = [abs(row["shares"][f"{RUN:.0%}"]["first"]) for row in rows if "run" in row]
    runs = [row["run"] for row in rows if "run" in row]
    return {
        "models": len(rows),
        "measured": len(off),
        "planned": len(planned_rows),
        "off_median": round(statistics.median(off), 5) if off else None,
        "off_worst": max(off, default=None),
        "first_median": round(statistics.median(first), 4) if first else None,
        "reached": {
            f"{share:.0%}": sum("peak" in row["shares"][f"{share:.0%}"] for row in planned_rows)
            for share in SHARES
        },
        "bitwise": f"{sum(run['bitwise'] for run in runs)} of {len(runs)}",
        "times": sorted(run["time"]["median"] for run in runs if "time" in run),
    }


def main() -> None:
    """The named models, or all; keeps the results of the others."""
    parser = argparse.ArgumentParser(prog="python -m bench.compiled")
    parser.add_argument("models", nargs="*", choices=[*MODELS, *OTHERS, []])
    parser.add_argument("--plan", action="store_true", help="compile nothing")
    parser.add_argument("--peaks", action="store_true", help="plan nothing")
    parser.add_argument("--clock", action="store_true", help="measure times too")
    options = parser.parse_args()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)
    models = saved("compiled").get("models", {})
    for name in options.models or (*MODELS, *OTHERS):
        found, choice = planned(name, () if options.peaks else SHARES)
        if not options.plan:
            measured(name, found, choice, clocks=options.clock)
        print(name, json.dumps(found), flush=True)
        models[name] = {**models.get(name, {}), **found}
        save("compiled", {"summary": summary(models), "models": models})
        gc.collect()
    print(json.dumps(summary(models), indent=1))


if __name__ == "__main__":
    main()
