"""The batch in parts: its peak and time as predicted and as measured.

    pip install --no-deps torchvision==0.28.0 timm transformers
    python -m bench.parts [MODEL ...]

Each module that may be split runs in 2, 4 and 8 parts. Times are medians of CPU seconds,
in rounds of random order; the error is that of the planned step's time, as a share of what was measured.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import sys
import time
from typing import Any

import torch
from tests.cases import nets, zoo
from torch import nn

from bench import models
from bench.machine import RESULTS, save, slug
from torchtrim import TrainStep
from torchtrim.executor.apply import named_roots
from torchtrim.executor.registry import Option
from torchtrim.records.plan import Technique
from torchtrim.records.trial import Request
from torchtrim.step.from_profile import step_of
from torchtrim.step.simulate import simulate
from torchtrim.step.step import Step
from torchtrim.techniques.micro_batch.technique import TECHNIQUE
from torchtrim.workflows.optimize.fitting import Fitting

PARTS = (2, 4, 8)
ROUNDS = 5
_WORDS = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}

MODELS: dict[str, zoo.Maker] = {
    "encoder": zoo.own(lambda: nets.Encoder(128), lambda: zoo.tokens(16, 64), zoo.next_token),
    "lstm": zoo.own(
        lambda: nets.Recurrent(nn.LSTM, 128), lambda: zoo.tokens(16, 64), zoo.next_token
    ),
    "autoencoder": zoo.own(nets.Autoencoder, lambda: zoo.pixels(16, 64), zoo.rebuilt),
    "u-net": zoo.own(nets.UNet, lambda: zoo.pixels(16, 64)),
    "control flow": zoo.own(
        models.Gated, lambda: (torch.randn(16, 64, 64), torch.zeros(16).long())
    ),
    "vit": zoo.timm("vit_tiny_patch16_224", 96, 16, img_size=96, depth=6),
    "convnext": zoo.timm("convnext_atto", 64, 16),
    "gpt2": zoo.transformer(
        "GPT2", "CausalLM", 64, 16, n_embd=128, n_layer=4, n_head=4, vocab_size=2000
    ),
    "llama": zoo.transformer(
        "Llama",
        "CausalLM",
        64,
        16,
        intermediate_size=512,
        num_key_value_heads=2,
        vocab_size=2000,
        **_WORDS,
    ),
    "bert": zoo.transformer(
        "Bert", "MaskedLM", 64, 16, intermediate_size=512, vocab_size=2000, **_WORDS
    ),
}


def options_of(step: Step) -> list[Option]:
    """The module that keeps most, in each number of parts."""
    found = TECHNIQUE.options(step)
    return [
        option
        for option in found
        if option.where == found[0].where and dict(option.settings)["parts"] in PARTS
    ]


def in_parts(option: Option) -> Technique:
    """The option as a plan has it."""
    return Technique(name="micro_batch", where=(option.where,), options=dict(option.settings))


def seconds(work: TrainStep, plans: dict[int, Technique | None]) -> dict[int, float]:
    """The median seconds of a step under each, in rounds of random order.

    Each runs twice where it is its turn, and the second is timed: the first tries the module.
    """
    taken: dict[int, list[float]] = {parts: [] for parts in plans}
    roots = named_roots((work.model,))
    for _ in range(ROUNDS):
        for parts in random.sample(list(plans), len(plans)):
            plan = plans[parts]
            handle = None if plan is None else TECHNIQUE.apply(roots, plan)
            work.step(0)
            begin = time.process_time()
            work.step(0)
            taken[parts].append(time.process_time() - begin)
            if handle is not None:
                handle.revert()
    return {parts: statistics.median(several) for parts, several in taken.items()}


def measure(make: zoo.Maker) -> dict[str, Any]:
    """One model: each number of parts, predicted and measured."""
    torch.manual_seed(0)
    sample = make()
    optimizer = torch.optim.AdamW(sample.model.parameters(), 1e-4)
    work = TrainStep(sample.model.train(), sample.loss, optimizer, sample.batch)
    original = Fitting(work, Request(steps=3), lambda _: None).observe()
    assert original.profile is not None
    step = step_of(original.profile, original.seconds)
    options = {int(dict(one.settings)["parts"]): one for one in options_of(step)}
    times = seconds(work, {1: None, **{parts: in_parts(one) for parts, one in options.items()}})
    rows = {}
    for parts, option in options.items():
        edit = TECHNIQUE.edits(step, option)
        assert edit is not None
        outcome = simulate(step, [edit])
        told, took = 1 + outcome.added_seconds / step.seconds, times[parts] / times[1]
        rows[parts] = {
            "where": option.where,
            "peak": round(outcome.peak_bytes / original.peak_bytes, 3),
            "predicted": round(told, 3),
            "measured": round(took, 3),
            "error": round(told / took - 1, 3),
        }
    return {"seconds": round(times[1], 4), "operators": len(step.tasks), "parts": rows}


def summary(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The errors of all predictions."""
    errors = [abs(row["error"]) for one in found.values() for row in one["parts"].values()]
    return {
        "predictions": len(errors),
        "median_error": statistics.median(errors),
        "largest_error": max(errors),
    }


def main() -> None:
    """The named models, or all; keeps the results of the others."""
    zoo.import_libraries()
    path = RESULTS / slug() / "parts.json"
    found = json.loads(path.read_text())["models"] if path.exists() else {}
    for name in sys.argv[1:] or MODELS:
        found[name] = measure(MODELS[name])
        gc.collect()
        print(name, json.dumps(found[name]), flush=True)
        save("parts", {"summary": summary(found), "models": found})
    print(json.dumps(summary(found), indent=1))


if __name__ == "__main__":
    main()
