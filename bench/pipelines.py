"""Simulated pipelines beside measured ones: time and rise of a step of each rank, for torch's schedules.

    python -m bench.pipelines [SCHEDULE...] [--ranks 2] [--microbatches 8] [--depth 8] [--width 256]
        [--rounds 3] [--json]

A small causal transformer of that depth and width, 16 samples of 64 tokens, is recorded once, and the
actions of its stages are clocked in one process. Each schedule is planned, and run in processes over gloo,
with one thread each, in rounds over all schedules. The median step of a round counts, and the median of the
rounds; times mean something where there is a free core for each rank.
`order` is the rank correlation of simulated and measured times over the schedules. `pairs`: of those pairs of
schedules whose measured times differ by more than either one's rounds do, how many are simulated in their
order.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from bench import machine
from torchtrim import __version__
from torchtrim.api import Script
from torchtrim.pipelines.orders import order_of
from torchtrim.planner.stages.chain import ChainReader
from torchtrim.planner.stages.choose import PipelineSettings, StageCandidate, choose, pipeline_of
from torchtrim.planner.stages.timing import step_rise
from torchtrim.records.pipeline import SCHEDULES, Pipeline, Schedule
from torchtrim.records.plan import Plan, Prediction
from torchtrim.records.trial import Request
from torchtrim.workflows.optimize.fitting import Fitting
from torchtrim.workflows.pipeline import Runs, clocked

STEPS = 12
SCRIPT = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 8, w // 8).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, w))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self, depth, width):
        super().__init__()
        self.token = nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 512)

    def forward(self, tokens):
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


net = Net(DEPTH, WIDTH)
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
for _ in range(40):
    tokens = torch.randint(512, (16, 65))
    optimizer.zero_grad()
    cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
"""


def runs_in(folder: str, script: Script, pipeline: Pipeline) -> Runs:
    """Runs of a pipeline, with a folder of their own."""
    plan = Plan(
        torchtrim=__version__,
        script=script.target,
        fingerprint={},
        budget_bytes=2**40,
        predicted=Prediction(peak_bytes=0, step_seconds=0.0),
        pipeline=pipeline,
    )
    return Runs(script, plan, STEPS, Path(folder), lambda _: None)


def measured(script: Script, pipeline: Pipeline) -> tuple[float, list[int]]:
    """Milliseconds of a step of one pipeline, in the middle, and the rise of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        ran = runs_in(folder, script, pipeline).run("pipeline", measured=True)
    times = [max(one) for one in zip(*(trial.seconds for trial, _ in ran.trials), strict=True)]
    return 1e3 * statistics.median(times[2::2]), [trial.peak_bytes for trial, _ in ran.trials]


def row(
    one: StageCandidate, recorded: float, runs: Sequence[tuple[float, list[int]]]
) -> dict[str, Any]:
    """Simulated and measured figures of a pipeline; `recorded`: simulated from the whole batch."""
    rises = [step_rise(one.stages, one.order, rank) for rank in range(len(one.order.ranks))]
    found = runs[0][1]
    middle = statistics.median(ms for ms, _ in runs)
    return {
        "schedule": one.schedule,
        "cuts": [stage.where for stage in one.stages[1:]],
        "bubble": one.simulated.bubble,
        "recorded_ms": recorded,
        "simulated_ms": simulated(one),
        "measured_ms": middle,
        "rounds_ms": [ms for ms, _ in runs],
        "time_off": simulated(one) / middle - 1,
        "simulated_bytes": rises,
        "measured_bytes": found,
        "bytes_off": max(abs(a / b - 1) for a, b in zip(rises, found, strict=True)),
    }


def simulated(one: StageCandidate) -> float:
    """Milliseconds of forward and backward of a step."""
    return 1e3 * max(bar.end for line in one.simulated.bars for bar in line)


def pairs(rows: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Pairs that differ by more than the rounds of either do: those simulated in their order, and all."""
    right = total = 0
    for one, other in itertools.combinations(rows, 2):
        apart = one["measured_ms"] - other["measured_ms"]
        spread = max(max(each["rounds_ms"]) - min(each["rounds_ms"]) for each in (one, other))
        if abs(apart) > spread:
            total += 1
            right += apart * (one["simulated_ms"] - other["simulated_ms"]) > 0
    return right, total


def order(rows: Sequence[dict[str, Any]]) -> float:
    """The rank correlation of simulated and measured times; 1 where there is one schedule."""
    if len(rows) < 2:
        return 1.0
    both = [_ranks([row[name] for row in rows]) for name in ("simulated_ms", "measured_ms")]
    return statistics.correlation(*both)


def _ranks(values: Sequence[float]) -> list[float]:
    """The place of each value among all; those alike share one."""
    return [sum(a < b for a in values) + (sum(a == b for a in values) - 1) / 2 for b in values]


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schedules", nargs="*", metavar="SCHEDULE", choices=[*SCHEDULES, []])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    schedules = cast(Sequence[Schedule], args.schedules or SCHEDULES)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(SCRIPT.replace("DEPTH", str(args.depth)).replace("WIDTH", str(args.width)))
        script = Script(str(path), device="cpu")
        fitting = Fitting(script, Request(), lambda _: None)
        trial = fitting.observe()
        reader = ChainReader(fitting.planner(trial).profile, trial.seconds)
        ways = PipelineSettings(args.ranks, 1, schedules, (args.microbatches,))
        before = choose(functools.cache(reader.chain), ways, None, order_of)
        with tempfile.TemporaryDirectory() as clocks:
            chosen, note = clocked(runs_in(clocks, script, before.pipeline), before, ways)
        assert not note, note
        recorded = {one.schedule: simulated(one) for one in before.others}
        runs: dict[str, list[tuple[float, list[int]]]] = {one: [] for one in schedules}
        for one in (*chosen.others,) * args.rounds:
            pipeline = pipeline_of(chosen.pipeline.root, one, ways)
            runs[one.schedule].append(measured(script, pipeline))
    rows = [row(one, recorded[one.schedule], runs[one.schedule]) for one in chosen.others]
    right, total = pairs(rows)
    data = {
        "rows": rows,
        "order": order(rows),
        "pairs": f"{right} of {total}",
        "time_off": max(abs(one["time_off"]) for one in rows),
    }
    for one in () if args.json else rows:
        print(
            f"{one['schedule']:22s} simulated {one['simulated_ms']:7.1f} ms, measured "
            f"{one['measured_ms']:7.1f} ms; bytes off by {one['bytes_off']:.1%} at most"
        )
    said = f"order {data['order']:.2f}, pairs {data['pairs']}, time off by {data['time_off']:.1%}"
    print(json.dumps(data, indent=1) if args.json else said)
    known = machine.saved("pipelines").get("models", {})
    name = f"{args.depth} blocks of {args.width}, {args.microbatches} micro-batches, {args.ranks} ranks"
    machine.save("pipelines", {"models": {**known, name: data}})


if __name__ == "__main__":
    main()
