"""All levers together on a small language model's step: a fifth of the peak, and what it takes in time.

    pip install --no-deps transformers
    python -m bench.combined [MODEL ...]

BITWISE and ROUNDING alone. Each budget is the whole loop, certified; times are medians of CPU
seconds in rounds by turns, each after a step that is not timed, in which what was applied has its first call.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from typing import Any

import torch
from tests.cases import zoo

from bench.machine import RESULTS, save, slug
from torchtrim import InfeasibleBudget, TrainStep
from torchtrim.executor.apply import apply_plan, named_roots
from torchtrim.records.budget import memory_limit
from torchtrim.records.plan import Plan
from torchtrim.records.terms import Terms
from torchtrim.records.trial import Request
from torchtrim.workflows.optimize.fitting import Fitting

TIMES, MOST_TIME = 5, 0.2
ROUNDS = 3
LENGTH, COUNT, VOCABULARY = 128, 16, 8192

MODELS: dict[str, zoo.Maker] = {
    "gpt2": zoo.transformer(
        "GPT2",
        "CausalLM",
        LENGTH,
        COUNT,
        n_embd=128,
        n_layer=4,
        n_head=4,
        n_positions=LENGTH,
        vocab_size=VOCABULARY,
    ),
    "llama": zoo.transformer(
        "Llama",
        "CausalLM",
        LENGTH,
        COUNT,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=344,
        vocab_size=VOCABULARY,
    ),
}


def timed(work: TrainStep, plan: Plan) -> tuple[float, float]:
    """The median seconds of a step as it is, and with the plan."""
    roots = named_roots((work.model, *work.optimizers))
    taken: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(ROUNDS):
        for planned in taken:
            applied = apply_plan(plan, roots) if planned else None
            work.step(0)
            begin = time.process_time()
            work.step(0)
            taken[planned].append(time.process_time() - begin)
            if applied is not None:
                applied.revert()
    return statistics.median(taken[False]), statistics.median(taken[True])


def measure(make: zoo.Maker) -> dict[str, Any]:
    """One model: a fifth of its peak, or the smallest that was found."""
    torch.manual_seed(0)
    sample = make()
    optimizer = torch.optim.AdamW(sample.model.parameters(), 1e-4)
    work = TrainStep(sample.model.train(), sample.loss, optimizer, sample.batch)
    fitting = Fitting(work, Request(steps=2), lambda _: None, Terms(allow="ROUNDING"))
    peak = fitting.observe().peak_bytes
    try:
        fit = fitting.fit(memory_limit(peak // TIMES))
    except InfeasibleBudget as error:
        print(fitting.notes, error, flush=True)
        return {"peak_bytes": peak, "smallest_bytes": error.smallest_bytes, "set_by": error.set_by}
    assert fit.planned is not None
    assert fit.certificate is not None
    before, after = timed(work, fit.plan)
    return {
        "peak_bytes": peak,
        "planned_bytes": fit.planned.peak_bytes,
        "times_less": round(peak / fit.planned.peak_bytes, 2),
        "seconds": round(before, 3),
        "more_time": round(after / before - 1, 3),
        "predicted_more_time": round(fit.plan.predicted.step_seconds / fit.original.seconds - 1, 3),
        "verdict": fit.certificate.verdict,
        "techniques": {one.name: len(one.where) for one in fit.plan.techniques},
    }


def main() -> None:
    """The named models, or all; keeps the results of the others."""
    zoo.import_libraries()
    path = RESULTS / slug() / "combined.json"
    for name in sys.argv[1:] or MODELS:
        one = measure(MODELS[name])
        gc.collect()
        models = json.loads(path.read_text())["models"] if path.exists() else {}
        models[name] = one
        print(name, json.dumps(one), flush=True)
        save("combined", {"goal": {"less": TIMES, "time": MOST_TIME}, "models": models})


if __name__ == "__main__":
    main()
