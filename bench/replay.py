"""What single operators that run again in backward bring: the smallest peak, and the time where 70 and 50 %
of the bytes of activations at the peak are kept, with the technique and without.

    python -m bench.replay [MODEL ...]

Peaks are simulated, which agrees with measured ones (tests/techniques/test_replay.py). Times are medians of
interleaved rounds, as shares of the original's.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tests.cases import nets
from torch import nn

import torchtrim
from bench.machine import save
from torchtrim import InfeasibleBudget, TrainStep
from torchtrim.analysis.timeline import by_kind, peak_operator
from torchtrim.executor.apply import apply_plan
from torchtrim.planner.planner import Planner
from torchtrim.records.budget import Budget
from torchtrim.records.plan import Plan

ROUNDS = 7
SHARES = (0.7, 0.5)


class Block(nn.Module):
    """A block of a language model, its activations called as functions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(n, t, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.proj(attended.transpose(1, 2).reshape(n, t, width)), 0.1)
        return x + F.dropout(self.fc2(F.gelu(self.fc1(self.ln2(x)))), 0.1)


class Images(nn.Module):
    """Convolutions with BatchNorm and ReLU."""

    def __init__(self, width: int = 24, depth: int = 6) -> None:
        super().__init__()
        widths = [3, *[width] * depth]
        self.convs = nn.ModuleList(nn.Conv2d(w, width, 3, padding=1) for w in widths)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in widths)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        return self.head(x.mean((2, 3)))


class Functions(nn.Module):
    """Layers without modules."""

    def __init__(self, width: int = 384, depth: int = 6) -> None:
        super().__init__()
        shape = width, width
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape) / 20) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + F.gelu(F.layer_norm(x, x.shape[-1:]) @ weight)
        return x


def language() -> nn.Module:
    """Four blocks."""
    return nn.Sequential(*(Block(256) for _ in range(4)), nn.LayerNorm(256), nn.Linear(256, 64))


class Case(NamedTuple):
    """A model and its batch."""

    model: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]


CASES = {
    "language": Case(language, lambda: torch.randn(4, 256, 256)),
    "images": Case(Images, lambda: torch.randn(8, 3, 64, 64)),
    "functions": Case(Functions, lambda: torch.randn(4096, 384)),
    "encoder": Case(nets.Encoder, lambda: torch.randint(4000, (4, 128))),
    "unet": Case(nets.UNet, lambda: torch.randn(4, 3, 96, 96)),
    "audio": Case(nets.Audio, lambda: torch.randn(8, 1, 16000)),
    "autoencoder": Case(nets.Autoencoder, lambda: torch.randn(4, 3, 96, 96)),
}


def squared(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A loss of any output."""
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def measure(name: str) -> dict[str, Any]:
    """One model: floors, and times at the budgets."""
    torch.manual_seed(0)
    model, batch = CASES[name].model(), CASES[name].batch()
    step = TrainStep(model, squared, torch.optim.SGD(model.parameters(), 1e-3), batch)
    seconds = statistics.median(_rounds({"original": (model, batch, None)})["original"])
    profile = torchtrim.record(step)
    planners = {
        "with": Planner(profile, step_seconds=seconds, fingerprint={}),
        "without": Planner(profile, step_seconds=seconds, fingerprint={}, exclude=("replay",)),
    }
    peak = planners["with"].simulated_original
    kinds = by_kind(profile, peak_operator(profile))
    found: dict[str, Any] = {"peak": peak, "activations": kinds.get("activation", 0)}
    for which, planner in planners.items():
        found[f"floor {which}"] = planner.floor.outcome.peak_bytes
    for share in SHARES:
        budget = int(peak - (1 - share) * found["activations"])
        found[f"{share:.0%}"] = _at(planners, budget, model, batch, seconds)
    return found


def _at(
    planners: dict[str, Planner], budget: int, model: nn.Module, batch: torch.Tensor, seconds: float
) -> dict[str, Any]:
    plans: dict[str, Plan] = {}
    for which, planner in planners.items():
        with contextlib.suppress(InfeasibleBudget):
            plans[which] = planner.plan(Budget(budget))
    runs = {which: (model, batch, plan) for which, plan in plans.items()}
    times = _rounds({"original": (model, batch, None), **runs})
    return {
        which: {
            "predicted": round(plan.predicted.step_seconds / seconds - 1, 4),
            "measured": round(_ratio(times[which], times["original"]) - 1, 4),
            "techniques": {one.name: len(one.where) for one in plan.techniques},
        }
        for which, plan in plans.items()
    }


def _ratio(times: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def _rounds(runs: dict[str, tuple[nn.Module, torch.Tensor, Plan | None]]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {which: [] for which in runs}
    for _ in range(ROUNDS + 1):
        for which, (model, batch, plan) in runs.items():
            with _planned(model, plan):
                begin = time.perf_counter()
                squared(model, batch).backward()
                times[which].append(time.perf_counter() - begin)
            model.zero_grad()
    return {which: several[1:] for which, several in times.items()}


@contextlib.contextmanager
def _planned(model: nn.Module, plan: Plan | None) -> Iterator[None]:
    if plan is None:
        yield
        return
    applied = apply_plan(plan, {type(model).__name__: model})
    try:
        yield
    finally:
        applied.revert()


def main() -> None:
    """The named models, or all."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"models": {}}
    for name in sys.argv[1:] or CASES:
        found["models"][name] = measure(name)
        print(name, found["models"][name], flush=True)
    save("replay", found)


if __name__ == "__main__":
    main()
