"""How far the peak of real models falls with BITWISE levers, and at what time, beside checkpointing by hand.

    pip install --no-deps torchvision==0.28.0 timm
    python -m bench.models [MODEL ...] [--plan | --clock]

Budgets keep 70, 50, 35 and 30 % of the bytes of kind activation at the original's peak, and the rest of the
peak whole. Each plan is run and certified; 15 more budgets are predicted. By hand: each block, or
every second one, is checkpointed; beside it is our plan for the peak which that reaches. Times are medians of
rounds in random order, as shares of the original's, of the second and third step under a plan. They are the
processor's, in one thread, of a malloc that keeps what is freed, in large pages; a step takes 0.4 s at least.
Other programs disturb them through the caches that they share, so `--plan` does all but the times, and
`--clock` those alone, later, when the machine is quiet.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from tests.cases import nets, zoo
from torch import nn

from bench.machine import keep_memory, keeps_memory, save, saved
from torchtrim import TrainStep
from torchtrim.analysis.timeline import by_kind, peak_operator
from torchtrim.core import caches
from torchtrim.errors import TorchtrimError, UsageError
from torchtrim.executor.apply import apply_plan, named_roots
from torchtrim.executor.registry import Option, technique
from torchtrim.planner.by_hand import checkpointed as blocks_among
from torchtrim.planner.planner import Planner
from torchtrim.records.budget import Budget, memory_limit
from torchtrim.records.plan import Plan, Technique
from torchtrim.records.trial import Request, Trial
from torchtrim.step.from_profile import step_of
from torchtrim.workflows.optimize.fitting import Fitting

ROUNDS, STEPS, PREDICTED = 3, 2, 15
KEPT = (0.7, 0.5, 0.35, 0.3)
GOALS = {0.7: 0.95, 0.5: 0.9, 0.35: 0.75, 0.3: 0.5}
_TEXT = {"n_positions": 512, "vocab_size": 2000, "n_embd": 192, "n_layer": 6, "n_head": 6}
_NARROW = {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 6}
_WORDS = {**_NARROW, "intermediate_size": 768, "vocab_size": 2000}


class Gated(nn.Module):
    """Blocks of which each call takes some, by what it sees: control flow."""

    def __init__(self, width: int = 192, depth: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
            )
            for _ in range(depth)
        )
        self.last = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number % 3 != 2 or float(x.detach().mean()) > -1:
                x = x + block(x)
        return self.last(x.mean(1))


def _vectors() -> Any:
    return torch.randn(24, 256, 64), torch.randint(10, (24,))


MODELS: dict[str, zoo.Maker] = {
    "encoder": zoo.own(nets.Encoder, lambda: zoo.tokens(24, 128), zoo.next_token),
    "u-net": zoo.own(nets.UNet, lambda: zoo.pixels(32, 128)),
    "lstm": zoo.own(lambda: nets.Recurrent(nn.LSTM), lambda: zoo.tokens(64, 128), zoo.next_token),
    "control flow": zoo.own(Gated, _vectors),
    "gpt2": zoo.transformer("GPT2", "CausalLM", 256, 8, **_TEXT),
    "llama": zoo.transformer("Llama", "CausalLM", 256, 12, num_key_value_heads=2, **_WORDS),
    "bert": zoo.transformer("Bert", "MaskedLM", 256, 8, **_WORDS),
    "t5": zoo.transformer(
        "T5",
        "Seq2SeqLM",
        128,
        12,
        d_model=192,
        d_kv=32,
        d_ff=768,
        num_layers=4,
        num_heads=6,
        vocab_size=2000,
        decoder_start_token_id=0,
    ),
    "mamba": zoo.transformer(
        "Mamba", "CausalLM", 64, 24, hidden_size=96, num_hidden_layers=2, vocab_size=2000
    ),
    "qwen2": zoo.transformer("Qwen2", "CausalLM", 256, 12, num_key_value_heads=2, **_WORDS),
    "vit": zoo.timm("vit_tiny_patch16_224", 224, 10),
    "deit": zoo.timm("deit3_small_patch16_224", 224, 4),
    "swin": zoo.timm("swin_tiny_patch4_window7_224", 224, 2),
    "convnext": zoo.timm("convnext_atto", 160, 20),
    "resnet": zoo.timm("resnet26", 128, 16),
    "densenet": zoo.vision("densenet121", 96, 16),
    "mixer": zoo.timm("mixer_s32_224", 224, 32),
    "efficientnet": zoo.timm("efficientnet_b0", 128, 16),
    "mobilenet": zoo.vision("mobilenet_v2", 128, 24),
    "sam 2's encoder": zoo.timm("hiera_tiny_224", 224, 4),
    "regnet": zoo.timm("regnety_004", 128, 28),
    "poolformer": zoo.timm("poolformer_s12", 128, 12),
}


def checkpointed(planner: Planner, peak: int) -> dict[str, Plan]:
    """The model with each block checkpointed, and with every second."""
    plain, options = planner.unchanged(Budget(peak)), technique("recompute").options
    made = blocks_among(options(step_of(planner.profile, 0.0)))
    return {
        name: msgspec.structs.replace(plain, techniques=(_recompute(chosen),))
        for name, chosen in made.items()
    }


def _recompute(options: tuple[Option, ...]) -> Technique:
    where = tuple(option.where for option in options)
    return Technique(name="recompute", where=where, equivalence="BITWISE")


def timed(work: TrainStep, plans: dict[str, Plan | None]) -> dict[str, float]:
    """The median seconds of a step under each plan, in rounds of random order."""
    taken: dict[str, list[float]] = {name: [] for name in plans}
    roots = named_roots((work.model, *work.optimizers))
    for _ in range(ROUNDS):
        for name in random.sample(list(plans), len(plans)):
            plan = plans[name]
            applied = apply_plan(plan, roots) if plan is not None else None
            work.step(0)
            for _ in range(STEPS):
                begin = time.process_time()
                work.step(0)
                taken[name].append(time.process_time() - begin)
            if applied is not None:
                applied.revert()
    return {name: statistics.median(several) for name, several in taken.items()}


class Measured(NamedTuple):
    """What is known of a model, and the plans whose times are wanted."""

    found: dict[str, Any]
    plans: dict[str, Plan | None]


def built(make: zoo.Maker) -> TrainStep:
    """A model's step, the same each time."""
    torch.manual_seed(0)
    sample = make()
    optimizer = torch.optim.AdamW(sample.model.parameters(), 1e-4)
    return TrainStep(sample.model.train(), sample.loss, optimizer, sample.batch)


def planned(work: TrainStep) -> Measured:
    """One model: what is reached, by hand and planned."""
    fitting = Fitting(work, Request(steps=3), lambda _: None)
    original = fitting.observe()
    assert original.profile is not None
    planner = fitting.planner(original)
    peak, bias = original.peak_bytes, original.peak_bytes - planner.simulated_original
    floor = planner.floor.outcome.peak_bytes + bias
    kept = by_kind(original.profile, peak_operator(original.profile)).get("activation", 0)
    plans: dict[str, Plan | None] = {"original": None}
    found: dict[str, Any] = {"peak": peak, "activations": kept, "floor": floor, "reached": {}}
    for share in KEPT:
        budget = int(peak - (1 - share) * kept)
        row: dict[str, Any] = {"budget": budget, "within_floor": floor <= budget}
        found["reached"][f"{share:.0%}"] = row
        if floor <= budget:
            fit = fitting.fit(memory_limit(budget))
            assert fit.planned is not None
            assert fit.certificate is not None
            row |= _figures(fit.plan, fit.planned) | {"verdict": fit.certificate.verdict}
            plans[f"{share:.0%}"] = fit.plan
    found["hand"] = _hand(fitting, planner, peak, bias, plans)
    found["inversions"] = inversions(planner, bias)
    found["predicted_original"] = planner.priced[1]
    return Measured(found, plans)


def clocked(work: TrainStep, measured: Measured) -> dict[str, Any]:
    """What was found, with the times."""
    found, plans = measured
    seconds = timed(work, plans)
    found["original_seconds"] = round(seconds["original"], 4)
    found["threads"] = torch.get_num_threads()
    found["malloc_keeps_large_pages"] = keeps_memory()
    for name, value in seconds.items():
        _row(found, name)["time"] = round(value / seconds["original"] - 1, 4)
    return found


def _path(name: str) -> Path:
    return caches.folder() / "bench-models" / f"{name}.json"


def _keep(name: str, measured: Measured) -> None:
    """Until the machine is quiet."""
    caches.write(_path(name), msgspec.json.encode(measured))


def _kept(name: str) -> Measured:
    try:
        return msgspec.json.decode(_path(name).read_bytes(), type=Measured)
    except FileNotFoundError:
        raise UsageError(f"{name} has no plans yet: python -m bench.models --plan") from None


def _figures(plan: Plan, trial: Trial) -> dict[str, Any]:
    return {
        "predicted": plan.predicted.peak_bytes,
        "measured": trial.peak_bytes,
        "techniques": {one.name: len(one.where) for one in plan.techniques},
        "predicted_time": plan.predicted.step_seconds,
        "gap": plan.gap,
    }


def _row(found: dict[str, Any], name: str) -> dict[str, Any]:
    row: dict[str, Any] = found["reached"].get(name) or found["hand"].setdefault(name, {})
    return row


def _hand(
    fitting: Fitting, planner: Planner, peak: int, bias: int, plans: dict[str, Plan | None]
) -> dict[str, Any]:
    """What a person reaches by hand, and our plan for the same peak."""
    found = {}
    for name, plan in checkpointed(planner, peak).items():
        trial = fitting.run_planned(plan)
        found[name] = {"measured": trial.peak_bytes}
        if trial.peak_bytes >= peak:
            continue
        ours = planner.plan(Budget(trial.peak_bytes, bias=bias))
        plans[name], plans[f"ours at {name}"] = plan, ours
        found[f"ours at {name}"] = _figures(ours, fitting.run_planned(ours))
    return found


def inversions(planner: Planner, bias: int) -> int:
    """How often a looser of many budgets gets a slower plan than a tighter one."""
    points = [one for one in planner.frontier(PREDICTED, bias=bias) if not one.by_hand]
    return sum(
        looser.step_seconds > tighter.step_seconds * (1 + 1e-9)
        for looser, tighter in pairwise(points)
    )


def summary(models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the goals are about."""
    found: dict[str, Any] = {"models": len(models)}
    for share in KEPT:
        rows = [one["reached"][f"{share:.0%}"] for one in models.values()]
        met = [row for row in rows if row.get("measured", row["budget"] + 1) <= row["budget"]]
        found[f"{share:.0%}"] = {
            "reached": round(len(met) / len(rows), 3),
            "goal": GOALS[share],
            "bitwise": sum(row["verdict"] == "BITWISE" for row in met),
            "median_time": statistics.median([row["time"] for row in met]) if met else None,
        }
    pairs = [
        (by_hand["time"], by_hand["time"] if _is_same(by_hand, ours) else ours["time"])
        for one in models.values()
        for name, by_hand in one["hand"].items()
        if "time" in (ours := one["hand"].get(f"ours at {name}", {}))
    ]
    found["never slower than by hand"] = f"{sum(b <= a for a, b in pairs)} of {len(pairs)}"
    found["median by hand"] = statistics.median([a for a, _ in pairs]) if pairs else None
    found["median ours at the same peak"] = (
        statistics.median([b for _, b in pairs]) if pairs else None
    )
    found["inversions"] = sum(one["inversions"] for one in models.values())
    return found


def _is_same(by_hand: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether nothing quicker was found than what is done by hand: the times differ by chance alone."""
    return ours["techniques"].keys() == {"recompute"} and by_hand["measured"] == ours["measured"]


def main() -> None:
    """The named models, or all; keeps the results of the others."""
    parser = argparse.ArgumentParser(prog="python -m bench.models")
    parser.add_argument("models", nargs="*", choices=[*MODELS, []])
    parser.add_argument("--plan", action="store_true", help="all but the times")
    parser.add_argument("--clock", action="store_true", help="the times of what --plan found")
    options = parser.parse_args()
    keep_memory("bench.models")
    torch.set_num_threads(1)
    zoo.import_libraries()
    models = saved("models").get("models", {})
    for name in options.models or MODELS:
        try:
            work = built(MODELS[name])
            measured = _kept(name) if options.clock else planned(work)
            if options.plan:
                _keep(name, measured)
                print(name, "is planned", flush=True)
                continue
            models[name] = clocked(work, measured)
        except (TorchtrimError, RuntimeError) as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            continue
        finally:
            gc.collect()
        print(name, json.dumps(models[name]), flush=True)
        save("models", {"summary": summary(models), "models": models})
    print(json.dumps(summary(models), indent=1))


if __name__ == "__main__":
    main()
