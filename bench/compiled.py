"""Compiled programs: the peak simulated from Inductor's code beside the allocator's, and plans for less.

    python -m bench.compiled [MODEL ...] [--only peak plans budgets run] [--shares 0.6] [--clock]

Peaks are bytes over those before the step, of forward and backward; the model stays compiled.

* `peak`: compiled and run, beside the simulated one. The processor's seconds of that compile, the C++
  compiler's included, without caches but with precompiled headers.
* `plans`: for 70, 60 and 50 % of the peak (`--shares`), by simulation, so without a C++ compiler; their
  seconds of planning, and what they compute again as a share of forward, by our model of costs.
* `budgets`: torch's own `activation_memory_budget` (solver `dp`) at five budgets with two estimators, its
  peaks and costs by the same simulation and model. Choices whose backward would draw random numbers again,
  which can make gradients wrong (`bench.compiled_gradient`), are counted apart. Beside each of the others is
  a plan of ours for its peak, which is no slower if it computes no more again.
* `run`: the plans for 60 and 50 % compiled and run: their peaks, and whether loss and gradients equal those
  of the compiled original, bit for bit.

`--clock` measures times of steps as well, in rounds of random order, of the processor in one thread: for a
quiet machine. With `budgets` and `run`, torch's choices are compiled too, and are timed beside the plans.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count, product
from typing import Any

import torch
import torch._functorch.config as functorch
import torch.nn.functional as F
from torch import fx
from torch._inductor.utils import fresh_cache

from bench.compiled_models import MODELS, OTHERS, Sample
from bench.machine import save, saved
from torchtrim.capture.allocator import CpuAllocator
from torchtrim.compiled.apply import Applied
from torchtrim.compiled.graphs import Graphs
from torchtrim.compiled.inductor import written_inputs
from torchtrim.compiled.joint import JointBuilder
from torchtrim.compiled.memory import GraphCall, Simulated, memory_of
from torchtrim.compiled.planning import GraphPlanner, SavingChoice

PARTS = ("peak", "plans", "budgets", "run")
SHARES = (0.7, 0.6, 0.5)
RUN = (0.6, 0.5)
ESTIMATORS = ("flops", "testing")
BUDGETS = (0.8, 0.6, 0.4, 0.3, 0.1)
ROUNDS = 15
_numbers = count()


class Work:
    """A compiled model's step. Its code is its own: Dynamo shares code among models of one backend."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.sample: Sample = (MODELS | OTHERS)[name]()
        # Dynamo tells backends apart by their options; this one has no effect without profiling.
        own = {"profile_bandwidth_regex": str(next(_numbers))}
        self._compiled = torch.compile(self.sample.model, options=own, **self.sample.options)

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
    torch._dynamo.reset()
    work, graphs = Work(name), Graphs()
    with graphs.watched():
        for _ in range(2):
            graphs.begin()
            work.step()
    return graphs


class Bench:
    """A model's graphs, without kernels, and plans for them. `found`: what is known so far."""

    def __init__(self, name: str) -> None:
        begin = cpu_seconds()
        self.name, self.graphs = name, watched(name)
        self.planner = GraphPlanner(self.graphs)
        self._own = self.planner.own.peak_bytes
        joints = self.graphs.joints
        self._forward = sum(value.seconds for joint in joints for value in joint.values)
        self.choices: dict[float, SavingChoice] = {}
        self.found: dict[str, Any] = {
            "predicted": self._own,
            "saved": self.planner.own.saved_bytes,
            "watch_seconds": round(cpu_seconds() - begin, 1),
        }

    def plan(self, share: float) -> None:
        """Plan for a share of the peak."""
        begin, budget = cpu_seconds(), int(share * self._own)
        choice = self.planner.plan(budget)
        row: dict[str, Any] = {"seconds": round(cpu_seconds() - begin, 1)}
        if choice is not None:
            self.choices[share] = choice
            row |= self._row(choice.simulated, choice.added_seconds)
            row |= {"first": round(choice.first_peak / budget - 1, 4)}
            row |= {"dry_compiles": choice.rounds}
        else:
            row["lowest"] = round(self.planner.lowest.simulated.peak_bytes / self._own, 4)
        self.found.setdefault("shares", {})[f"{share:.0%}"] = row

    def budgets(self) -> Iterator[None]:
        """Simulate torch's own choices."""
        rows: list[dict[str, Any]] = []
        self.found["budgets"] = rows
        known: dict[frozenset[str], dict[str, Any]] = {}
        for estimator, budget in product(ESTIMATORS, BUDGETS):
            with torch_budget(budget, estimator):
                row = self._torchs(known)
            rows.append({"estimator": estimator, "budget": budget, **row})
            yield
        asked: set[float] = set()
        for row in sorted((row for row in rows if "peak" in row), key=lambda row: row["peak"]):
            row["ours"] = self._ours(row, asked)
            yield

    def _ours(self, point: dict[str, Any], asked: set[float]) -> dict[str, float]:
        """A plan with a peak no higher than that of torch's choice: one that is known, or a new one."""
        known, peak = self._best_within(point), point["peak"]
        if peak not in asked and (known is None or known["again"] > point["again"]):
            asked.add(peak)
            choice = self.planner.plan(int(peak * self._own))
            self.choices |= {peak: choice} if choice is not None else {}
        return self._best_within(point) or {}

    def _best_within(self, point: dict[str, Any]) -> dict[str, float] | None:
        rows = (self._row(one.simulated, one.added_seconds) for one in self.choices.values())
        fit = (row for row in rows if row["peak"] <= point["peak"])
        return min(fit, key=lambda row: row["again"], default=None)

    def _torchs(self, known: dict[frozenset[str], dict[str, Any]]) -> dict[str, Any]:
        (graph,), names = self.graphs.graphs, frozenset[str]()
        saved: dict[str, frozenset[int]] = {}

        def choose(joint: fx.Graph, info: Any, own: Callable[[], list[fx.Node]]) -> list[fx.Node]:
            nonlocal names
            chosen = own()
            names = frozenset(node.name for node in chosen)
            if names in known:
                raise _Known
            made = JointBuilder(joint, info, written_inputs(joint)).build(chosen)
            saved[made.key] = made.own
            return chosen

        try:
            simulated = memory_of([GraphCall(graph.code(choose))], self.graphs.rises)
        except _Known:
            return known[names]
        except ValueError as error:
            if "draws" not in str(error):
                raise
            known[names] = {"draws_again": True}
            return known[names]
        known[names] = self._row(simulated, self.planner.added_seconds(saved))
        return known[names]

    def _row(self, simulated: Simulated, added: float) -> dict[str, float]:
        return {
            "peak": round(simulated.peak_bytes / self._own, 4),
            "saved": round(simulated.saved_bytes / self._own, 4),
            "again": round(added / self._forward, 4),
        }

    def run(self, parts: set[str], *, clocks: bool) -> Iterator[None]:
        """Compile and run the original, and the plans if there are any; yield after each, for a note."""
        begin = cpu_seconds()
        original = compiled(self.name, None)
        self.found["compile_seconds"] = round(cpu_seconds() - begin, 1)
        peak, results = original.peak(), original.results()
        self.found |= {"measured": peak, "off": round(self._own / peak - 1, 5)}
        yield
        if "run" not in parts:
            return
        runs = self.found["runs"] = {}
        for share in RUN:
            if share in self.choices:
                work = compiled(self.name, self.choices[share])
                runs[f"{share:.0%}"] = self._ran(self.choices[share], work, results)
                if clocks:
                    runs[f"{share:.0%}"]["time"] = timed(original.step, work.step)
                yield
        if clocks and "budgets" in self.found:
            yield from self._clock_budgets(original)

    def _clock_budgets(self, original: Work) -> Iterator[None]:
        """Measure the peak and the time of each of torch's choices, and of the plan beside it."""
        clocked: dict[tuple[float, float], dict[str, Any]] = {}
        for row in self.found["budgets"]:
            if not row.get("ours"):
                continue
            for point in (row, row["ours"]):
                key = point["peak"], point["again"]
                if key not in clocked:
                    torchs = torch_budget(row["budget"], row["estimator"])
                    # From no cache, where a plan's partitioner, which says that it was used, would not run.
                    with fresh_cache(), torchs if point is row else nullcontext():
                        work = compiled(self.name, None if point is row else self._choice(point))
                    clocked[key] = {
                        "measured": work.peak(),
                        "time": timed(original.step, work.step),
                    }
                point |= clocked[key]
            yield

    def _choice(self, point: dict[str, float]) -> SavingChoice:
        """Return the plan of a row."""
        rows = ((one, self._row(one.simulated, one.added_seconds)) for one in self.choices.values())
        return next(one for one, row in rows if row.items() <= point.items())

    def _ran(self, choice: SavingChoice, work: Work, results: list[torch.Tensor]) -> dict[str, Any]:
        peak, others = work.peak(), work.results()
        same = [torch.equal(a, b) for a, b in zip(results, others, strict=True)]
        return {
            "peak": peak,
            "off": round(choice.simulated.peak_bytes / peak - 1, 5),
            "bitwise": all(same),
            "loss_bitwise": same[0],
            "furthest": max(map(_far, results[:-1], others[:-1])),
        }


class _Known(Exception):
    """A choice of torch's that was simulated already."""


def torch_budget(budget: float, estimator: str) -> AbstractContextManager[Any]:
    """Compile by torch's own budget."""
    context: AbstractContextManager[Any] = functorch.patch(
        activation_memory_budget=budget, activation_memory_budget_runtime_estimator=estimator
    )
    return context


def cpu_seconds() -> float:
    """The processor's seconds of this process and of those that it waited for."""
    return sum(os.times()[:4])


def compiled(name: str, choice: SavingChoice | None) -> Work:
    """A step compiled by a plan, or as torch does."""
    applied = Applied(choice.graphs if choice else ())
    with applied.installed() if choice else nullcontext():
        work = Work(name)
        work.step()
    assert not applied.failures, applied.failures
    assert not applied.unused, f"graphs of no plan: {applied.others}"
    return work


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
    plans = [row["shares"] for row in rows if "shares" in row]
    off = [abs(row["off"]) for row in rows if "off" in row]
    first = [abs(one["first"]) for row in plans for one in row.values() if "first" in one]
    runs = [(share, run) for row in rows for share, run in row.get("runs", {}).items()]
    budgets = [row for row in rows if "budgets" in row]
    points = [one for row in budgets for one in row["budgets"]]
    return {
        "measured": len(off),
        "off_median": round(statistics.median(off), 5) if off else None,
        "off_worst": max(off, default=None),
        "planned": len(plans),
        "reached": {
            f"{share:.0%}": sum(_lowest(row) <= share for row in rows if "shares" in row)
            for share in SHARES
        },
        "first_median": round(statistics.median(first), 4) if first else None,
        "cost_in_compiles": sorted(_cost(row) for row in rows if _has_cost(row)),
        "bitwise": f"{sum(run['bitwise'] for _, run in runs)} of {len(runs)}",
        "times": {
            f"{share:.0%}": sorted(
                run["time"]["median"] for of, run in runs if of == f"{share:.0%}" and "time" in run
            )
            for share in RUN
        },
        "torch": {
            "models": len(budgets),
            "budgets": len(points),
            "wrong": sum("draws_again" in one for one in points),
            "compared": sum("ours" in one for one in points),
            "no_slower": sum(_no_slower(one) for one in points if "ours" in one),
            "lower_peaks": sum(_lowest(row) < _lowest_of_torch(row) for row in budgets),
            "clocked": sorted(
                round(one["ours"]["time"]["median"] / one["time"]["median"], 3)
                for one in points
                if "time" in one
            ),
        },
    }


def _no_slower(point: dict[str, Any]) -> bool:
    return "again" in point["ours"] and bool(point["ours"]["again"] <= point["again"])


def _has_cost(row: dict[str, Any]) -> bool:
    return "compile_seconds" in row and "60%" in row.get("shares", {})


def _cost(row: dict[str, Any]) -> float:
    """Ordinary compiles that take as long as the watch and the plan for 60 %."""
    seconds = row["watch_seconds"] + row["shares"]["60%"]["seconds"]
    return round(seconds / row["compile_seconds"], 2)


def _lowest(row: dict[str, Any]) -> float:
    at_torchs = (one["ours"] for one in row.get("budgets", ()) if one.get("ours"))
    plans = (*row.get("shares", {}).values(), *at_torchs)
    return float(min((one.get("peak", one.get("lowest")) for one in plans), default=1.0))


def _lowest_of_torch(row: dict[str, Any]) -> float:
    return float(min((one["peak"] for one in row["budgets"] if "peak" in one), default=1.0))


def main() -> None:
    """The named models, or all; keeps the results of the others."""
    parser = argparse.ArgumentParser(prog="python -m bench.compiled")
    parser.add_argument("models", nargs="*", choices=[*MODELS, *OTHERS, []])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, help="of the peak")
    parser.add_argument("--clock", action="store_true", help="measure times too")
    options = parser.parse_args()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 100  # a model is compiled once for each of its plans
    parts, models = {*options.only}, saved("compiled").get("models", {})
    compiles = bool(parts & {"peak", "run"})
    with fresh_cache() if compiles else nullcontext():
        if compiles:  # the headers are precompiled once
            torch.compile(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
        for name in options.models or (*MODELS, *OTHERS):
            for found in measured(name, parts, options.shares, clocks=options.clock):
                models[name] = merged(models.get(name, {}), found)
                save("compiled", {"summary": summary(models), "models": models})
            print(name, json.dumps(found), flush=True)
            gc.collect()
    print(json.dumps(summary(models), indent=1))


def merged(known: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return what is known of a model with what was found now: other shares stay."""
    shares = known.get("shares", {}) | found.get("shares", {})
    return (
        known | found | ({"shares": dict(sorted(shares.items(), reverse=True))} if shares else {})
    )


def measured(
    name: str, parts: set[str], shares: Sequence[float], *, clocks: bool
) -> Iterator[dict[str, Any]]:
    """What the wanted parts find out about a model, after each."""
    bench = Bench(name)
    yield bench.found
    if parts & {"plans", "run"}:
        for share in shares:
            bench.plan(share)
            yield bench.found
    if "budgets" in parts and name in MODELS:
        yield from (bench.found for _ in bench.budgets())
    if parts & {"peak", "run"}:
        yield from (bench.found for _ in bench.run(parts, clocks=clocks))


if __name__ == "__main__":
    main()
