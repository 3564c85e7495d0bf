"""The chosen cut of real models into stages, beside every way to cut them.

    python -m bench.cuts [NAME ...] [--library DIR] [--save]

Each model of `cases.zoo` that can be cut is run dry, with the times of an A100 by the roofline. It is cut for
1F1B and for Interleaved1F1B on 2, 3 and 4 ranks and 8 micro-batches, as `torchtrim plan --stages` does, and
in all other ways where these are at most 2,000. Said is by how much a step with the chosen cut is slower
than with the best of all, as simulated.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Iterator
from math import comb
from typing import Any, cast

import torch
from tests.cases import zoo

from bench import machine
from torchtrim import TrainStep, estimate
from torchtrim.costs.devices import DEVICES
from torchtrim.costs.roofline import estimate as roofline
from torchtrim.errors import TorchtrimError
from torchtrim.pipelines.orders import order_of
from torchtrim.planner.stages.chain import ChainReader
from torchtrim.planner.stages.choose import PipelineSettings, all_cuts, choose
from torchtrim.planner.stages.timing import stages_of, step_seconds
from torchtrim.records.pipeline import Schedule

_MOST_WAYS = 2_000
_MICROBATCHES = 8
_DEVICE = "a100"
MODELS = {name: make for models in zoo.SETS.values() for name, make in models.items()}


def reader_of(name: str) -> ChainReader:
    """The chain of a step of the model, run dry. Raises `TorchtrimError` where it cannot be cut."""

    def made() -> TrainStep:
        sample = MODELS[name]()
        sample.model.eval()
        optimizer = torch.optim.SGD(sample.model.parameters(), 1e-3)
        return TrainStep(sample.model, sample.loss, optimizer, sample.batch)

    profile = estimate(made, device=_DEVICE).profile
    return ChainReader(profile, 0.0, roofline(profile, DEVICES[_DEVICE]).device_seconds)


def compared(reader: ChainReader) -> Iterator[dict[str, Any]]:
    """A row for each way to run it whose cuts can all be tried."""
    chain_of = functools.cache(reader.chain)
    chain = chain_of(1 / _MICROBATCHES)._replace(batch=_MICROBATCHES)
    count = len(chain.segments)
    for schedule, each in (("1F1B", 1), ("Interleaved1F1B", 2)):
        for ranks in (2, 3, 4):
            stages = each * ranks
            if stages > count or comb(count - 1, stages - 1) > _MOST_WAYS:
                continue
            order = order_of(cast("Schedule", schedule), ranks, stages, _MICROBATCHES)
            if order is None:
                continue
            ways = PipelineSettings(ranks, 1, (cast("Schedule", schedule),), (_MICROBATCHES,))
            began = time.perf_counter()
            chosen = choose(lambda _: chain, ways, None, order_of)
            seconds = time.perf_counter() - began
            best = min(
                step_seconds(stages_of(chain, cuts), order, ways.link)
                for cuts in all_cuts(count, stages)
            )
            found = step_seconds(chosen.best.stages, order, ways.link)
            yield {
                "schedule": schedule,
                "ranks": ranks,
                "segments": count,
                "ways": comb(count - 1, stages - 1),
                "slower_than_best": found / best - 1,
                "seconds": round(seconds, 3),
            }


def main() -> None:
    """Compare, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all of them by default")
    parser.add_argument(
        "--library", default="", help="where torchvision, timm and transformers are"
    )
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    sys.path += [options.library] if options.library else []
    found: dict[str, list[dict[str, Any]]] = {}
    refused: dict[str, str] = {}
    for name in options.names or MODELS:
        try:
            found[name] = list(compared(reader_of(name)))
        except (TorchtrimError, ImportError, RuntimeError, AssertionError) as error:
            refused[name] = f"{type(error).__name__}: {str(error)[:120]}"
            print(f"{name}: {refused[name]}", flush=True)
            continue
        worst = max((row["slower_than_best"] for row in found[name]), default=0.0)
        print(f"{name}: {len(found[name])} ways to run, {worst:.1%} slower at most", flush=True)
    cut = {name: rows for name, rows in found.items() if rows}
    print(
        f"{len(cut)} models, {_worst(cut):.1%} slower than the best at most; {len(refused)} not cut"
    )
    if options.save:
        _save(cut, refused)


def _worst(models: dict[str, list[dict[str, Any]]]) -> float:
    return max((row["slower_than_best"] for rows in models.values() for row in rows), default=0.0)


def _save(cut: dict[str, list[dict[str, Any]]], refused: dict[str, str]) -> None:
    """Save these models beside those that were saved before."""
    known = machine.saved("cuts")
    models = {**known.get("models", {}), **cut}
    refusals = {**known.get("not_cut", {}), **refused}
    data = {
        "models": {name: models[name] for name in MODELS if name in models},
        "not_cut": {
            name: refusals[name] for name in MODELS if name in refusals and name not in models
        },
        "worst": _worst(models),
    }
    machine.save("cuts", data)


if __name__ == "__main__":
    main()
