"""What a certificate takes, of the processor's time and of memory.

python -m bench.certifying [MODEL ... | memory] [--json]

Time: that of all runs that a certificate makes, beside that of the compared steps alone, for models whose
steps take a tenth of a second or more. Memory: by how many times its parameters the highest resident memory
grows beyond that of the steps: the slope between two sizes of a model, in a process each. Each run replaces
the models of the result that it is asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from msgspec.structs import replace
from tests.cases import nets, zoo
from torch import nn

from bench.clean import MODELS, STEPS, recomputing
from bench.machine import RESULTS, save, slug
from torchtrim.capture.workload import TrainStep
from torchtrim.executor.apply import apply_plan, named_roots
from torchtrim.records.budget import Budget
from torchtrim.records.certificate import Verdict
from torchtrim.records.plan import Plan
from torchtrim.records.trial import Request
from torchtrim.runner import trials
from torchtrim.workflows.optimize.fitting import Fitting
from torchtrim.workflows.verify import verify_pair


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


def memory_in_parameters(kind: str, *more: str) -> float:
    """How many times its parameters a certificate needs beyond the step, from two sizes of a model."""
    found = []
    for width in (50_000, 400_000):
        said = subprocess.run(
            [
                sys.executable,
                "-m",
                "bench.certifying",
                "--memory",
                str(width),
                "--optimizer",
                kind,
                *more,
            ],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        found.append(json.loads(said.splitlines()[-1]))
    small, large = found
    beyond = [one["certified"] - one["plain"] for one in found]
    return round((beyond[1] - beyond[0]) / (large["parameters"] - small["parameters"]), 2)


def _seconds(step: TrainStep, count: int) -> float:
    begin = time.process_time()
    for number in range(count):
        step.step(number)
    return time.process_time() - begin


def cost_of(make: zoo.Maker) -> dict[str, Any]:
    """What certificates of one model take, in the time of the compared steps alone.

    `agree`: of a plan whose bits agree, beside the planned steps; `differ`: of a pair whose updates round
    otherwise, beside the steps of one of them, with every run of both. Neither records a step, whose memory
    is another measurement of `verify`; `with_memory` is of the plan with it.
    """
    step, request = _with_adam(make, fused=False), Request(steps=3)
    alone = replace(request, measured=False)
    _seconds(step, 2)
    fitting = Fitting(step, request, lambda _: None)
    plan = fitting.planner(fitting.observe(), "recompute").floor_plan(Budget(1))
    applied = apply_plan(plan, named_roots((step.model, *step.optimizers)))
    planned = min(_seconds(step, request.total) for _ in range(2))
    applied.revert()
    verdict, agree = _verified(step, plan, alone)
    _, measured = _verified(step, plan, request)
    one, two = (_with_adam(make, fused=fused) for fused in (False, True))
    begin = time.process_time()
    certificate = verify_pair(one, two, alone).report.certificate
    differ = time.process_time() - begin
    assert certificate is not None
    plain = min(_seconds(step, request.total) for _ in range(2))
    return {
        "step_seconds": round(plain / request.total, 3),
        "agree": {
            "verdict": verdict,
            "of_the_steps": round(agree / planned, 2),
            "with_memory": round(measured / planned, 2),
        },
        "differ": {"verdict": certificate.verdict, "of_the_steps": round(differ / plain, 2)},
    }


def _verified(step: TrainStep, plan: Plan, request: Request) -> tuple[Verdict, float]:
    """Return the verdict on a plan, and the seconds that it took after the original's run."""
    fitting = Fitting(step, request, lambda _: None)
    original = fitting.observe()
    begin = time.process_time()
    return fitting.verify(original, plan).verdict, time.process_time() - begin


def _with_adam(make: zoo.Maker, *, fused: bool) -> TrainStep:
    torch.manual_seed(0)
    sample = make()
    optimizer = torch.optim.Adam(sample.model.parameters(), 1e-3, fused=fused)
    return TrainStep(sample.model.train(), sample.loss, optimizer, sample.batch)


def _scored(*shape: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(shape),)


def _squared(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch[0]).square().mean()
    return loss


COSTS: dict[str, zoo.Maker] = {
    "encoder": zoo.own(nets.Encoder, lambda: zoo.tokens(8, 128), zoo.next_token),
    "lstm": zoo.own(lambda: nets.Recurrent(nn.LSTM), lambda: zoo.tokens(16, 96), zoo.next_token),
    "gru": zoo.own(lambda: nets.Recurrent(nn.GRU), lambda: zoo.tokens(16, 96), zoo.next_token),
    "u-net": zoo.own(nets.UNet, lambda: zoo.pixels(8, 128)),
    "audio": zoo.own(nets.Audio, lambda: zoo.waves(16)),
    "video": zoo.own(nets.Video, lambda: zoo.clips(4)),
    "autoencoder": zoo.own(nets.Autoencoder, lambda: zoo.pixels(8, 96), zoo.rebuilt),
    "relative": zoo.own(nets.Relative, lambda: zoo.pixels(8, 96), _squared),
    "batch norm": zoo.own(MODELS["batch norm"][0], lambda: _scored(64, 8, 32, 32), _squared),
    "perceptron": zoo.own(MODELS["perceptron"][0], lambda: _scored(65_536, 24), _squared),
}


def _highest() -> int:
    """Resident bytes of this program at most, without what ran in the process before, as `ru_maxrss` has."""
    status = Path("/proc/self/status").read_text()
    (kib,) = re.findall(r"VmHWM:\s*(\d+) kB", status)
    return int(kib) * 1024


_MEMORY = "memory_beyond_the_step_in_parameters"


def summary(of: dict[str, Any]) -> dict[str, Any]:
    """Return the middle and the largest ratio of each kind."""
    found: dict[str, Any] = {"models": len(of)}
    for kind in ("agree", "differ"):
        ratios = [one[kind]["of_the_steps"] for one in of.values()]
        found[kind] = {"median": round(statistics.median(ratios), 2), "most": max(ratios)}
    return found


def main() -> None:
    """Measure models, and put them beside those that were measured before."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", choices=[*COSTS, "memory", []])
    parser.add_argument("--json", action="store_true", help="write the result")
    parser.add_argument("--memory", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--files", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--optimizer", default="SGD", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        room = mock.patch.object(trials, "host_bytes", return_value=(0, 0))
        with room if options.files else contextlib.nullcontext():
            print(json.dumps(memory(options.memory, options.optimizer)))
        return
    path = RESULTS / slug() / "certifying.json"
    known = json.loads(path.read_text()) if options.json and path.exists() else {}
    of, parameters = known.get("of", {}), known.get(_MEMORY, {})
    for name in options.models or [*COSTS, "memory"]:
        if name == "memory":
            parameters = {kind: memory_in_parameters(kind) for kind in ("SGD", "Adam")}
            parameters["Adam, copies in files"] = memory_in_parameters("Adam", "--files")
            print(parameters, flush=True)
        else:
            of[name] = cost_of(COSTS[name])
            print(name, of[name], flush=True)
        if options.json and of:
            save("certifying", {**summary(of), _MEMORY: parameters, "of": of})


if __name__ == "__main__":
    main()
