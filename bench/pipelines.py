"""Simulated pipelines beside measured ones: time and rise of a step of each rank, for torch's schedules.

    python -m bench.pipelines [SCHEDULE...] [--ranks 2] [--microbatches 8] [--depth 8] [--width 256] [--json]

A small causal transformer of that depth and width, 16 samples of 64 tokens, is recorded once. Each schedule
is planned for it, and run in real processes over gloo, with one thread each. The quickest step of each
counts, which is the one that other work on the machine has disturbed least; times mean something where there
is a core for each rank.
`order` is the rank correlation of simulated and measured times over the schedules.
"""

from __future__ import annotations

import argparse
import functools
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
from torchtrim.loops.optimize import Fitting
from torchtrim.loops.pipeline import Runs
from torchtrim.pipelines.orders import order_of
from torchtrim.planner.stages.chain import Reader
from torchtrim.planner.stages.choose import Chosen, Ways, choose
from torchtrim.planner.stages.timing import step_rise
from torchtrim.records.pipeline import SCHEDULES, Schedule
from torchtrim.records.plan import Plan, Prediction
from torchtrim.records.trial import Request

STEPS = 30
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


def measured(script: Script, chosen: Chosen) -> dict[str, Any]:
    """Simulated and measured figures of one pipeline: milliseconds of a step, and the rise of each rank."""
    plan = Plan(
        torchtrim=__version__,
        script=script.target,
        fingerprint={},
        budget_bytes=2**40,
        predicted=Prediction(peak_bytes=0, step_seconds=0.0),
        pipeline=chosen.pipeline,
    )
    with tempfile.TemporaryDirectory() as folder:
        ran = Runs(script, plan, STEPS, Path(folder), lambda _: None).run("pipeline", measured=True)
    best = chosen.best
    end = max(bar.end for line in best.simulated.bars for bar in line)
    rises = [step_rise(best.stages, best.order, rank) for rank in range(chosen.pipeline.ranks)]
    found = [trial.peak_bytes for trial, _ in ran.trials]
    times = [max(one) for one in zip(*(trial.seconds for trial, _ in ran.trials), strict=True)]
    return {
        "schedule": chosen.pipeline.schedule,
        "cuts": chosen.pipeline.cuts,
        "bubble": chosen.pipeline.bubble,
        "simulated_ms": 1e3 * end,
        "measured_ms": 1e3 * min(times[2::2]),
        "simulated_bytes": rises,
        "measured_bytes": found,
        "bytes_off": max(abs(a / b - 1) for a, b in zip(rises, found, strict=True)),
    }


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
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(SCRIPT.replace("DEPTH", str(args.depth)).replace("WIDTH", str(args.width)))
        script = Script(str(path), device="cpu")
        fitting = Fitting(script, Request(), lambda _: None)
        trial = fitting.observe()
        reader = Reader(fitting.planner(trial).profile, trial.seconds)
        for schedule in cast(Sequence[Schedule], args.schedules or SCHEDULES):
            ways = Ways(args.ranks, 1, (schedule,), (args.microbatches,))
            row = measured(script, choose(functools.cache(reader.chain), ways, None, order_of))
            rows.append(row)
            if not args.json:
                print(
                    f"{schedule:22s} simulated {row['simulated_ms']:7.1f} ms, measured "
                    f"{row['measured_ms']:7.1f} ms; bytes off by {row['bytes_off']:.1%} at most",
                    flush=True,
                )
    data = {
        "ranks": args.ranks,
        "microbatches": args.microbatches,
        "rows": rows,
        "order": order(rows),
    }
    print(json.dumps(data, indent=1) if args.json else f"order {data['order']:.2f}")
    machine.save("pipelines", data)


if __name__ == "__main__":
    main()
