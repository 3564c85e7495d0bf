"""Offload on the emulated device: stalls as predicted and as a clock sees them, and joint plans.

python -m bench.offload [NAME ...]      all models, or these; writes results/MACHINE/offload.json

Nothing is timed: all figures are of the named device's model, so they are the same on every machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tests.cases.clock import DeviceClock, clocked, seconds_of
from torch import nn

import torchtrim
from bench.machine import RESULTS, save, slug
from torchtrim.analysis.prices import device_of
from torchtrim.capture.workload import TrainStep
from torchtrim.emulator import emulate
from torchtrim.executor.registry import Option
from torchtrim.planner.planner import Planner
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Profile
from torchtrim.step.edits import Edit
from torchtrim.step.from_profile import on_device, step_of
from torchtrim.step.links import traffic
from torchtrim.step.step import DETACH, Step
from torchtrim.techniques.offload_activations.technique import TECHNIQUE

QUEUEING = 2e-5
SHARES = (0.85, 0.7, 0.55)
Make = Callable[[], TrainStep]


class Residual(nn.Module):
    """Blocks with a way around them."""

    def __init__(self, width: int = 48, layers: int = 5) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.outer = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for inner, outer in zip(self.inner, self.outer, strict=True):
            value, gate = inner(x).chunk(2, -1)
            x = x + outer(torch.tanh(value) * F.relu(gate))
        return x


class Shared(nn.Module):
    """One layer that is called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(48, 48), nn.LayerNorm(48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = F.gelu(self.norm(self.layer(x)))
        return x


class Skips(nn.Module):
    """Down, and up again with what was kept on the way."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            nn.Conv2d(3 if not i else width, width, 3, padding=1) for i in range(3)
        )
        self.up = nn.ModuleList(nn.Conv2d(2 * width, width, 3, padding=1) for _ in range(3))
        self.bottom = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.down:
            x = F.silu(layer(x))
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = F.silu(self.bottom(x))
        for layer in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = F.silu(layer(torch.cat([x, kept.pop()], 1)))
        return x


def mlp(layers: int, width: int, act: Callable[[], nn.Module] = nn.GELU) -> nn.Sequential:
    """Layers with an activation each."""
    inner = [part for _ in range(layers) for part in (nn.Linear(width, width), act())]
    return nn.Sequential(*inner)


def convolutions(layers: int, width: int, norm: bool = False) -> nn.Sequential:
    """A flat stack of them."""
    inner: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(layers):
        inner += [nn.BatchNorm2d(width)] if norm else []
        inner += [nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
    return nn.Sequential(*inner)


def attention(layers: int, width: int, dropout: float) -> nn.Module:
    """An encoder."""
    layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def squared(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A loss of any output."""
    found: torch.Tensor = model(batch).square().mean()
    return found


def of(model: Callable[[], nn.Module], *shape: int, adam: bool = False) -> Make:
    """A step of a model on the emulated device."""

    def make() -> TrainStep:
        torch.manual_seed(0)
        net = model().cuda()
        optimizer: Any = torch.optim.AdamW if adam else torch.optim.SGD
        return TrainStep(
            net, squared, optimizer(net.parameters(), 1e-3), torch.randn(*shape, device="cuda")
        )

    return make


MODELS: dict[str, Make] = {
    "mlp": of(lambda: mlp(5, 32), 8192, 32),
    "deep mlp": of(lambda: mlp(12, 48, nn.Tanh), 4096, 48),
    "wide mlp": of(lambda: mlp(4, 512), 1024, 512, adam=True),
    "residual": of(Residual, 8192, 48),
    "shared": of(Shared, 8192, 48),
    "dropout": of(lambda: nn.Sequential(mlp(3, 48), nn.Dropout(0.2), mlp(3, 48)), 8192, 48),
    "norms": of(lambda: nn.Sequential(mlp(3, 48), nn.LayerNorm(48), mlp(3, 48)), 8192, 48),
    "relu": of(lambda: mlp(8, 64, nn.ReLU), 4096, 64),
    "silu": of(lambda: mlp(8, 64, nn.SiLU), 4096, 64),
    "convolutions": of(lambda: convolutions(5, 8), 4, 3, 96, 96),
    "deep convolutions": of(lambda: convolutions(12, 8), 4, 3, 64, 64),
    "batch norms": of(lambda: convolutions(5, 8, norm=True), 4, 3, 96, 96),
    "u-net": of(Skips, 4, 3, 96, 96),
    "encoder": of(lambda: attention(2, 64, 0.1), 16, 128, 64, adam=True),
    "deep encoder": of(lambda: attention(5, 32, 0.0), 16, 128, 32, adam=True),
    "wide encoder": of(lambda: attention(2, 128, 0.1), 8, 128, 128, adam=True),
    "leaky": of(lambda: mlp(6, 64, nn.LeakyReLU), 4096, 64),
    "sigmoid": of(lambda: mlp(7, 48, nn.Sigmoid), 8192, 48),
    "wide convolutions": of(lambda: convolutions(4, 16), 4, 3, 64, 64),
    "deep residual": of(lambda: Residual(32, 9), 4096, 32),
}


class Stalls(NamedTuple):
    """Seconds for which compute awaits copies, as predicted and as a clock saw, and the copies of both."""

    predicted: float
    clocked: float
    copies: tuple[int, int]

    @property
    def error(self) -> float:
        """By how much the prediction is off, as a share of what was seen."""
        return abs(self.predicted - self.clocked) / max(self.clocked, 1e-9)


def recorded(make: Make) -> Profile:
    """The step as it is."""
    with emulate():
        return torchtrim.record(make())


def priced(profile: Profile) -> Step:
    """The step with what it costs on the device that it was recorded for."""
    return on_device(step_of(profile), device_of(profile))


def every(step: Step, options: Iterable[Option] | None = None) -> dict[str, Edit]:
    """All places, or those of these options, that do not exclude each other, and what each changes."""
    found: dict[str, Edit] = {}
    taken: set[int] = set()
    for option in TECHNIQUE.options(step) if options is None else options:
        edit = TECHNIQUE.edits(step, option)
        claimed = {task for span in edit.claims for task in range(*span)} if edit else set()
        if edit is not None and not claimed & taken:
            taken |= claimed
            found[option.where] = edit
    return found


def stalls(make: Make, profile: Profile, where: Sequence[str]) -> Stalls:
    """Those of a plan that offloads these places."""
    step = priced(profile)
    edits = technique_edits(step, where)
    predicted = traffic(step, edits)
    names = [operator.name for operator in profile.operators]
    took = [0.0 if task.name.startswith(DETACH) else task.seconds for task in step.tasks]
    seconds = seconds_of(names, took)
    clock = DeviceClock(seconds, device_of(profile).link, QUEUEING)
    with emulate(streams="early") as emulation:
        work = make()
        planned = TECHNIQUE.settled(step, Technique(name=TECHNIQUE.name, where=tuple(where)))
        TECHNIQUE.apply({type(work.model).__name__: work.model}, planned)
        for number in range(2):
            work.step(number)
        with clocked(emulation, clock):
            work.step(2)
        torch.cuda.synchronize()
    pairs = zip(step.tasks, took, strict=True)
    least = sum(one for task, one in pairs if task.phase != "optimizer")
    assert 0.99 * least <= clock.busy <= 1.01 * step.clock[-1], "the clock missed operators"
    return Stalls(predicted.stall, clock.stall, (len(predicted.copies), len(clock.copies)))


def technique_edits(step: Step, where: Sequence[str]) -> list[Any]:
    """What offloading these places changes."""
    from torchtrim.techniques.offload_activations.places import place_of
    from torchtrim.techniques.offload_activations.windows import edit_of

    return [edit for one in where if (edit := edit_of(step, place_of(one))) is not None]


def joint(profile: Profile) -> list[dict[str, Any]]:
    """At shares of the peak: what plans add that may use all, recomputation alone, offload alone; and a
    bound of all."""
    whole = planner(profile)
    alone = {
        "recomputed": planner(profile, "offload_activations", "offload_optimizer"),
        "offloaded": planner(
            profile, *(name for name in names_but_offload(whole) if name not in ("overwrite",))
        ),
    }
    rows = []
    for share in SHARES:
        budget = int(whole.simulated_original * share)
        found = whole._within(budget)
        if found is None:
            continue
        row: dict[str, Any] = {
            "share": share,
            "joint": found.outcome.added_seconds,
            "bound": found.bound_seconds,
            "techniques": sorted({option.technique for option in found.options}),
        }
        for name, other in alone.items():
            choice = other._within(budget)
            row[name] = choice.outcome.added_seconds if choice is not None else None
        rows.append(row)
    return rows


def names_but_offload(whole: Planner) -> list[str]:
    """The techniques of a planner's options that do not offload."""
    from torchtrim.executor.registry import names

    return [name for name in names() if not name.startswith("offload_")]


def planner(profile: Profile, *exclude: str) -> Planner:
    """A planner without some techniques."""
    return Planner(profile, step_seconds=1.0, fingerprint={}, exclude=exclude)


def is_never_slower(row: dict[str, Any]) -> bool:
    """Whether a plan that may use all adds no more than one of a kind."""
    others = [row[name] for name in ("recomputed", "offloaded") if row[name] is not None]
    return all(row["joint"] <= other * (1 + 1e-9) + 1e-12 for other in others)


def measure(make: Make) -> dict[str, Any]:
    """All of one model."""
    profile = recorded(make)
    where = tuple(every(priced(profile)))
    seen = {
        name: stalls(make, profile, chosen)
        for name, chosen in (("all", where), ("every other", where[::2]))
    }
    return {
        "places": len(where),
        "stalls": {
            name: {
                "predicted_us": round(one.predicted * 1e6, 3),
                "clocked_us": round(one.clocked * 1e6, 3),
                "copies": one.copies,
            }
            for name, one in seen.items()
        },
        "largest_error": max(one.error for one in seen.values()),
        "joint": joint(profile),
    }


def summary(models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the goals are about."""
    rows = [row for one in models.values() for row in one["joint"]]
    errors = [one["largest_error"] for one in models.values()]
    return {
        "models": len(models),
        "largest error of predicted stalls": max(errors, default=None),
        "models within 5 %": sum(error <= 0.05 for error in errors),
        "joint plans": len(rows),
        "never slower than one of a kind": sum(map(is_never_slower, rows)),
        "at the bound": sum(row["joint"] <= row["bound"] * (1 + 1e-4) + 1e-12 for row in rows),
    }


def main() -> None:
    """The named models, or all; keeps the results of the others."""
    path = RESULTS / slug() / "offload.json"
    models = json.loads(path.read_text())["models"] if path.exists() else {}
    for name in sys.argv[1:] or MODELS:
        models[name] = measure(MODELS[name])
        print(name, json.dumps(models[name]), flush=True)
        save("offload", {"summary": summary(models), "models": models})
    print(json.dumps(summary(models), indent=1))


if __name__ == "__main__":
    main()
