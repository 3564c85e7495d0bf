"""What people write by hand to train in less memory, beside our plan for the same peak.

    pip install --no-deps torchvision==0.28.0 timm
    python -m bench.by_hand [MODEL ...] [--compile]

Each block checkpointed, every second one, each with its products and attention kept (selective
checkpointing), and the batch in two halves: written here as a person writes it, with torch's own functions.
Beside each is our plan for the peak that it reaches; for the halves, which round otherwise, what rounds
otherwise is allowed. With `--compile`, `activation_memory_budget` of a compiled model instead. Peaks are
measured, those by hand on a model of its own. Times are the processor's, in one thread, medians of rounds in
random order, as shares of the original's, of the second step after a change, of a malloc that keeps what is
freed, in large pages.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from tests.cases import zoo
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torchtrim
from bench.machine import keep_memory, save, saved
from bench.models import MODELS
from torchtrim import TrainStep
from torchtrim.errors import InfeasibleBudget
from torchtrim.executor.apply import apply_plan, named_roots
from torchtrim.executor.registry import technique
from torchtrim.planner.by_hand import checkpointed as blocks_among
from torchtrim.records.budget import memory_limit
from torchtrim.records.terms import Terms
from torchtrim.records.trial import Request
from torchtrim.step.from_profile import step_of
from torchtrim.workflows.optimize.fitting import Fitting

ROUNDS = 5
NAMES = ("gpt2", "llama", "bert", "vit", "encoder", "control flow", "convnext", "t5")
COMPILED = ("encoder", "vit")
BUDGETS = (0.5, 0.2)
HALVES = "the batch in two halves"
aten = torch.ops.aten
_KEPT = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}
Step = Callable[[], None]
Ways = dict[str, tuple[AbstractContextManager[Any], Step]]


def products_kept(_context: Any, function: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """The policy that torchtitan and others give: what is dear to compute again is kept."""
    keeps = function in _KEPT
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def checkpointed(blocks: list[nn.Module], *, selective: bool = False) -> Iterator[None]:
    """While open, the blocks are computed again in backward."""
    contexts = partial(create_selective_checkpoint_contexts, products_kept)
    options: dict[str, Any] = {"context_fn": contexts} if selective else {}
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def blocks_of(model: nn.Module, profile: Any) -> list[nn.Module]:
    """The model's numbered blocks, in their order."""
    options = technique("recompute").options(step_of(profile, 0.0))
    found = blocks_among(options).get("each block checkpointed", ())
    return [model.get_submodule(option.where.partition(".")[2]) for option in found]


def in_halves(sample: zoo.Sample, optimizer: torch.optim.Optimizer) -> Step:
    """A step that goes through the batch in two parts, and adds their gradients up."""

    def step() -> None:
        for half in range(2):
            loss = sample.loss(sample.model, tree_map(partial(_half, half), sample.batch)) / 2
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
        optimizer.step()
        optimizer.zero_grad()

    return step


def _half(number: int, leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or not leaf.dim():
        return leaf
    size = leaf.shape[0] // 2
    return leaf[number * size : (number + 1) * size]


def peak(step: Step) -> int:
    """Bytes at the peak of a step. What it draws is not missing afterwards."""
    with torch.random.fork_rng(devices=[]):
        return torchtrim.measure(step, warmup=1, device="cpu").peak_bytes


def timed(ways: Ways) -> dict[str, float]:
    """The median seconds of a step each way, in rounds of random order."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name in random.sample(list(ways), len(ways)):
            context, step = ways[name]
            with context:
                step()
                begin = time.process_time()
                step()
                taken[name].append(time.process_time() - begin)
    return {name: statistics.median(several[1:]) for name, several in taken.items()}


class _Again:
    """A context that can be entered again and again: each time another of `make`."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._open = self._make()
        self._open.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)


class Trained(NamedTuple):
    """A model with its optimizer, and its step."""

    sample: zoo.Sample
    optimizer: torch.optim.Optimizer
    work: TrainStep

    @classmethod
    def of(cls, make: zoo.Maker) -> Trained:
        """From the same seed each time."""
        torch.manual_seed(0)
        sample = make()
        sample.model.train()
        if hasattr(sample.model, "config"):
            sample.model.config.use_cache = False  # a checkpointed block would append to it twice
        optimizer = torch.optim.AdamW(sample.model.parameters(), 1e-4)
        return cls(sample, optimizer, TrainStep(sample.model, sample.loss, optimizer, sample.batch))

    @property
    def step(self) -> Step:
        """One training step."""
        return partial(self.work.step, 0)


def ways_of(trained: Trained, profile: Any) -> Ways:
    """What a person writes."""
    blocks = blocks_of(trained.sample.model, profile)
    step = trained.step
    return {
        "each block": (_Again(partial(checkpointed, blocks)), step),
        "every second block": (_Again(partial(checkpointed, blocks[::2])), step),
        "each block, products kept": (
            _Again(partial(checkpointed, blocks, selective=True)),
            step,
        ),
        HALVES: (nullcontext(), in_halves(trained.sample, trained.optimizer)),
    }


def measure(make: zoo.Maker) -> dict[str, Any]:
    """One model: each way by hand, and ours at its peak."""
    trained, other = Trained.of(make), Trained.of(make)
    fitting = Fitting(trained.work, Request(steps=2), lambda _: None)
    rounding = Fitting(trained.work, Request(steps=2), lambda _: None, Terms(allow="ROUNDING"))
    original = fitting.observe()
    found: dict[str, Any] = {"peak": original.peak_bytes, "by hand": {}, "ours": {}}
    base = peak(other.step) - original.peak_bytes
    for name, (context, step) in ways_of(other, original.profile).items():
        with context:
            found["by hand"][name] = {"peak": peak(step) - base}
    del other
    ways = {"original": (nullcontext(), trained.step), **ways_of(trained, original.profile)}
    _compare(found, ways, trained, lambda name: rounding if name == HALVES else fitting)
    return found


def _compare(
    found: dict[str, Any], ways: Ways, trained: Trained, fitting: Callable[[str], Fitting]
) -> None:
    """Our plan for each peak that is reached by hand, and the times of all."""
    roots = named_roots((trained.work.model, *trained.work.optimizers))
    for name, row in found["by hand"].items():
        ours = _ours(fitting(name), row["peak"])
        if ours is not None:
            plan, found["ours"][name] = ours
            ways[f"ours, {name}"] = _Again(partial(_applied, plan, roots)), trained.step
    seconds = timed(ways)
    for name, row in found["by hand"].items():
        row["time"] = _more(seconds, name)
        if name in found["ours"]:
            found["ours"][name]["time"] = _more(seconds, f"ours, {name}")
    found["seconds"] = round(seconds["original"], 4)


def _more(seconds: dict[str, float], name: str) -> float:
    return round(seconds[name] / seconds["original"] - 1, 4)


@contextmanager
def _applied(plan: Any, roots: Any) -> Iterator[None]:
    applied = apply_plan(plan, roots)
    try:
        yield
    finally:
        applied.revert()


def _ours(fitting: Fitting, budget: int) -> tuple[Any, dict[str, Any]] | None:
    """Our plan for that peak, run and certified; None where there is none or nothing has to change."""
    if budget >= fitting.observe().peak_bytes:
        return None
    try:
        fit = fitting.fit(memory_limit(budget))
    except InfeasibleBudget:
        return None
    if fit.planned is None or fit.certificate is None:
        return None
    return fit.plan, {
        "peak": fit.planned.peak_bytes,
        "techniques": {one.name: len(one.where) for one in fit.plan.techniques},
        "verdict": fit.certificate.verdict,
    }


def allocated(step: Step) -> int:
    """The most bytes that a step has beyond those before it, as the allocator counts them.

    What is compiled allocates without an operator that could be watched.
    """
    with torch.random.fork_rng(devices=[]):
        step()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            step()
    results = found.profiler.kineto_results if found.profiler is not None else None
    assert results is not None
    events = [
        (one.start_ns(), one.nbytes()) for one in results.events() if one.name() == "[memory]"
    ]
    return max(accumulate((size for _, size in sorted(events, key=itemgetter(0))), initial=0))


def compiled(make: zoo.Maker) -> dict[str, Any]:
    """A compiled model as it is and with activation budgets, and our plan for the eager one at that peak."""
    trained, other = Trained.of(make), Trained.of(make)
    fitting = Fitting(trained.work, Request(steps=2), lambda _: None)
    original = fitting.observe()
    ways: Ways = {"original": (nullcontext(), trained.step)}
    found: dict[str, Any] = {"peak": original.peak_bytes, "by hand": {}, "ours": {}}
    base = allocated(other.step) - original.peak_bytes
    sample = other.sample
    for budget in (1.0, *BUDGETS):
        model = torch.compile(sample.model, backend=partial(_with_budget, budget))
        work = TrainStep(model, sample.loss, other.optimizer, sample.batch)
        name = f"compiled, budget {budget}"
        found["by hand"][name] = {"peak": allocated(partial(work.step, 0)) - base}
        ways[name] = nullcontext(), partial(work.step, 0)
    _compare(found, ways, trained, lambda _: fitting)
    return found


def _with_budget(budget: float, graph: Any, inputs: Any) -> Any:
    """A backend of its own for each budget, so that one's code is not taken for another."""
    import torch._functorch.config as functorch
    from torch._inductor.compile_fx import compile_fx

    with functorch.patch(activation_memory_budget=budget):
        return compile_fx(graph, inputs)


def summary(models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """By way: how often ours is no slower, and the medians."""
    found = {}
    for name in dict.fromkeys(way for one in models.values() for way in one["by hand"]):
        pairs = [
            (one["by hand"][name]["time"], one["ours"][name]["time"])
            for one in models.values()
            if name in one["ours"] and name in one["by hand"]
        ]
        if pairs:
            found[name] = {
                "no slower": f"{sum(ours <= hand for hand, ours in pairs)} of {len(pairs)}",
                "by hand": round(statistics.median(hand for hand, _ in pairs), 4),
                "ours": round(statistics.median(ours for _, ours in pairs), 4),
            }
    return found


def main() -> None:
    """The named models; keeps the results of the others."""
    parser = argparse.ArgumentParser(prog="python -m bench.by_hand")
    parser.add_argument("models", nargs="*")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    keep_memory("bench.by_hand")
    torch.set_num_threads(1)
    zoo.import_libraries()
    measured = compiled if options.compile else measure
    result = "by_hand-compiled" if options.compile else "by_hand"
    models = saved(result).get("models", {})
    for name in options.models or (COMPILED if options.compile else NAMES):
        models[name] = measured(MODELS[name])
        gc.collect()
        print(name, json.dumps(models[name]), flush=True)
        save(result, {"summary": summary(models), "models": models})
    print(json.dumps(summary(models), indent=1))


if __name__ == "__main__":
    main()
