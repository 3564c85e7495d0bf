"""Estimated peaks beside measured ones on the CPU, and beside what others estimate.

    python -m bench.estimates [--only NAME ...] [--seconds S]

Each model of `bench.zoo` runs in evaluation and trains with SGD and Adam, plain and with its blocks
recomputed. Measured is a step after one of warm-up, by the allocator's own events; estimated is the same
step dry. The table of workspaces was made with the models for calibration; the others were held out.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from bench import machine, zoo
from torchtrim import Inference, TrainStep, estimate
from torchtrim.certify.session import Session
from torchtrim.certify.trial import Request
from torchtrim.observe.build import Setting
from torchtrim.records.profile import Profile
from torchtrim.techniques.rerun import rerun_whole

CASES = ("eval", "sgd", "adam", "sgd recomputed", "adam recomputed")
EXACT = ("parameter", "gradient", "optimizer_state")


def workload(sample: zoo.Sample, case: str) -> TrainStep | Inference:
    """The case's step of a model."""
    sample.model.train(case != "eval")
    if case == "eval":
        batch = sample.batch
        return Inference(sample.model, batch if isinstance(batch, dict) else batch[0])
    parameters = sample.model.parameters()
    make = torch.optim.SGD if case.startswith("sgd") else torch.optim.Adam
    return TrainStep(sample.model, sample.loss, make(parameters, 1e-3), sample.batch)


def measured(work: TrainStep | Inference) -> Profile:
    """The profile of a step that runs, after one of warm-up. The model is another afterwards."""
    session = Session(
        Request(steps=0, warmup=1), Setting("cpu", "", str(Path.cwd())), trains=work.trains
    )
    session.watcher.optimizers.extend(work.optimizers)
    with session.watcher:
        for number in range(2):
            work.step(0)
            if not work.trains or number:
                session.step_ends()
    profile = session.finish().profile
    assert profile is not None
    return profile


@contextlib.contextmanager
def recomputed(model: nn.Module) -> Iterator[int]:
    """Each block of every chain of equal modules runs again in backward."""
    swapped = [rerun_whole(block) for block in blocks_of(model)]
    try:
        yield len(swapped)
    finally:
        for one in swapped:
            one.revert()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules of chains of at least two of a class, the outermost ones."""
    found: list[nn.Module] = []
    for module in model.children():
        blocks = [*module.children()]
        chain = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(blocks) > 1
        alike = chain and len({type(block) for block in blocks}) == 1
        plain = alike and not isinstance(blocks[0], (nn.ModuleList, nn.Sequential))
        found += blocks if plain else blocks_of(module)
    return found


def case_of(sample: zoo.Sample, case: str) -> dict[str, Any]:
    """One row: estimated before measured, so that nothing of the run helps."""
    with recomputed(sample.model) if "recomputed" in case else contextlib.nullcontext(0) as blocks:
        work = workload(sample, case)
        gc.collect()
        begin = time.perf_counter()
        found = estimate(work)
        seconds = time.perf_counter() - begin
        real = measured(work)
    error = found.peak_bytes / real.peak_bytes - 1
    return {
        "measured": real.peak_bytes,
        "tracked": real.tracked_peak_bytes,
        "estimated": found.peak_bytes,
        "error": error,
        "exact": {
            kind: kind_bytes(real, kind) == kind_bytes(found.profile, kind) for kind in EXACT
        },
        "seconds": round(seconds, 2),
        "blocks": blocks,
    }


def kind_bytes(profile: Profile, kind: str) -> int:
    """Bytes of all storages of a kind."""
    return sum(storage.bytes for storage in profile.storages if storage.kind == kind)


def by_mem_tracker(sample: zoo.Sample, case: str) -> int | None:
    """torch's MemTracker under FakeTensorMode, the model and its batch made fake."""
    with contextlib.suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.nn.utils.stateless._reparametrize_module
        state = {
            name: mode.from_tensor(tensor)
            for name, tensor in (*sample.model.named_parameters(), *sample.model.named_buffers())
        }
        batch = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, sample.batch)
        with fake(sample.model, state):
            work = workload(sample._replace(batch=batch), case)
            tracker = MemTracker()
            tracker.track_external(sample.model, *work.optimizers, batch)
            with tracker:
                work.step(0)
                tracker.reset_mod_stats()
                work.step(0)
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    return None


def by_accelerate(sample: zoo.Sample, case: str) -> int | None:
    """`accelerate estimate-memory`: the parameters, and four times as much for training with Adam."""
    if case == "sgd":
        return None
    total = sum(p.nbytes for p in sample.model.parameters())
    return total * (4 if case == "adam" else 1)


def by_torchinfo(sample: zoo.Sample, case: str) -> int | None:
    """torchinfo's "estimated total size", which is of forward and backward, without an optimizer."""
    with contextlib.suppress(Exception):
        from torchinfo import summary

        inputs = sample.batch if isinstance(sample.batch, dict) else sample.batch[0]
        found = summary(sample.model, input_data=inputs, verbose=0)
        return int(found.total_input + found.total_output_bytes + found.total_param_bytes)
    return None


RIVALS: dict[str, Callable[[zoo.Sample, str], int | None]] = {
    "MemTracker on fake tensors": by_mem_tracker,
    "accelerate estimate-memory": by_accelerate,
    "torchinfo": by_torchinfo,
}


def model_of(name: str, make: zoo.Maker) -> dict[str, Any]:
    """All cases of a model; what failed says how."""
    rows = {}
    for case in CASES:
        torch.manual_seed(0)
        try:
            rows[case] = case_of(make(), case)
            told = f"{rows[case]['error']:+.3%} of {rows[case]['measured'] / 2**20:.0f} MiB"
        except Exception as error:
            rows[case] = {"failed": f"{type(error).__name__}: {error}"[:300]}
            told = rows[case]["failed"]
        print(f"{name:<24} {case:<16} {told}", flush=True)
        gc.collect()
    return rows


def add_rivals(rows: dict[str, Any], make: zoo.Maker) -> None:
    """What the others estimate. They leave hooks and models behind, so they come last."""
    for case, row in rows.items():
        if "error" in row and "recomputed" not in case:
            torch.manual_seed(0)
            sample = make()
            row["others"] = {name: rival(sample, case) for name, rival in RIVALS.items()}


def summary_of(models: dict[str, Any]) -> dict[str, Any]:
    """Median and worst error of the rows that ran, ours and the others'."""
    rows = [row for cases in models.values() for row in cases.values() if "error" in row]
    errors = [abs(row["error"]) for row in rows]
    others: dict[str, list[float]] = {name: [] for name in RIVALS}
    for row in rows:
        for name, value in row.get("others", {}).items():
            if value is not None:
                others[name].append(abs(value / row["measured"] - 1))
    return {
        "models": len(models),
        "rows": len(rows),
        "failed": sum(len(cases) for cases in models.values()) - len(rows),
        "median": statistics.median(errors) if errors else None,
        "worst": max(errors, default=None),
        "exact": all(all(row["exact"].values()) for row in rows),
        "others": {
            name: {"rows": len(v), "median": statistics.median(v), "worst": max(v)}
            for name, v in others.items()
            if v
        },
    }


def main() -> None:
    """Run, print, save after each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--set", choices=["calibration", "held out"], nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=7200.0, help="begin no model after that")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sets = {"held out": zoo.HELD_OUT, "calibration": zoo.CALIBRATION}
    begin = time.monotonic()
    results: dict[str, Any] = {}
    measured_models: dict[str, Any] = {}
    for title, models in sets.items():
        if options.set and title not in options.set:
            continue
        rows: dict[str, Any] = {}
        for name, make in models.items():
            late = time.monotonic() - begin > options.seconds
            if not late and (not options.only or name in options.only):
                rows[name] = model_of(name, make)
        measured_models[title] = (models, rows)
        results[title] = {"summary": summary_of(rows), "models": rows}
        print(title, json.dumps(results[title]["summary"], indent=1))
        machine.save("estimates", results)
    for title, (models, rows) in measured_models.items():
        for name, cases in rows.items():
            add_rivals(cases, models[name])
        results[title]["summary"] = summary_of(rows)
        print(title, json.dumps(results[title]["summary"], indent=1))
        machine.save("estimates", results)


if __name__ == "__main__":
    main()
