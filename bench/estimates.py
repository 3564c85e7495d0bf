"""Estimated peaks beside measured ones on the CPU, and beside what others estimate.

    python -m bench.estimates [--only NAME ...] [--set SET ...] [--part models|others] [--save]

Each model of `cases.zoo` runs in evaluation and trains with SGD and Adam, plain and recomputed: with the
plan of the smallest peak that torchtrim makes for its training, or, where none saves anything, with each
of the model's children that has parameters run again. Measured is a step after one of warm-up, by the
allocator's own events; estimated is the same step dry. The table of workspaces was made with the models for
calibration; the others were held out.

The others are asked for the same steps: `MemTracker` for all of them, with its hooks on fake tensors; the
rest only for plain ones, since they know of no recomputation.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.cases import zoo
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from bench import machine
from torchtrim import Inference, TrainStep, estimate
from torchtrim.capture.build import Setting
from torchtrim.executor.registry import Handles, technique
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Profile
from torchtrim.records.trial import Request
from torchtrim.runner.session import Session

KINDS = ("eval", "sgd", "adam")
CASES = (*KINDS, *(f"{kind} recomputed" for kind in KINDS))
PARTS = ("models", "others")
EXACT = ("parameter", "gradient", "optimizer_state")


def workload(sample: zoo.Sample, case: str) -> TrainStep | Inference:
    """The case's step of a model."""
    sample.model.train(not case.startswith("eval"))
    if case.startswith("eval"):
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
    try:
        with session.watcher:
            for number in range(2):
                work.step(0)
                if not work.trains or number:
                    session.step_ends()
    finally:
        profile = session.finish().profile
    assert profile is not None
    return profile


def recomputation(model: nn.Module, places: tuple[str, ...]) -> Handles:
    """torchtrim's recompute at places of a plan; where there are none, at each child with parameters."""
    root = type(model).__name__
    if not places:
        children = model.named_children()
        places = tuple(f"{root}.{name}" for name, child in children if [*child.parameters()])
    applied = Handles()
    applied.add(
        technique("recompute").apply({root: model}, Technique(name="recompute", where=places))
    )
    return applied


def case_of(sample: zoo.Sample, case: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """One row, and where a plan would recompute. Estimated first: nothing of the run helps."""
    work = workload(sample, case)
    gc.collect()
    begin = time.process_time()
    found = estimate(work)
    seconds = time.process_time() - begin
    real = measured(work)
    row = {
        "measured": real.peak_bytes,
        "tracked": real.tracked_peak_bytes,
        "estimated": found.peak_bytes,
        "error": found.peak_bytes / real.peak_bytes - 1,
        "exact": all(kind_bytes(real, kind) == kind_bytes(found.profile, kind) for kind in EXACT),
        "cpu_seconds": round(seconds, 2),
    }
    return row, found.facts.recomputed


def kind_bytes(profile: Profile, kind: str) -> int:
    """Bytes of all storages of a kind."""
    return sum(storage.counted for storage in profile.storages if storage.kind == kind)


def by_mem_tracker(sample: zoo.Sample, case: str) -> int:
    """torch's MemTracker under FakeTensorMode, the model and its batch made fake."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
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


def by_accelerate(sample: zoo.Sample, case: str) -> int | None:
    """`accelerate estimate-memory`: the parameters, and for training with Adam a multiple of them."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    total, _ = calculate_maximum_sizes(sample.model)
    if case == "sgd":
        return None
    return int(total if case == "eval" else max(estimate_training_usage(total, "float32").values()))


def by_torchinfo(sample: zoo.Sample, case: str) -> int:
    """torchinfo's "estimated total size", which is of forward and backward, without an optimizer."""
    from torchinfo import summary

    inputs = sample.batch if isinstance(sample.batch, dict) else sample.batch[0]
    found = summary(sample.model, input_data=inputs, verbose=0, device="cpu")
    return int(found.total_input + found.total_output_bytes + found.total_param_bytes)


def by_kitsune(sample: zoo.Sample, case: str) -> int | None:
    """torch-kitsune's prediction, for models whose batch is one tensor of floats."""
    from kitsune import predict_memory

    inputs = None if isinstance(sample.batch, dict) else sample.batch[0]
    if inputs is None or not inputs.is_floating_point():
        return None
    shape, size = tuple(inputs.shape[1:]), inputs.shape[0]
    options = {"optimizer": "none" if case == "eval" else case, "training": case != "eval"}
    found = predict_memory(sample.model, shape, size, inputs.dtype, **options)
    return int(found.total_bytes)


RIVALS: dict[str, Callable[[zoo.Sample, str], int | None]] = {
    "MemTracker on fake tensors": by_mem_tracker,
    "accelerate estimate-memory": by_accelerate,
    "torchinfo": by_torchinfo,
    "torch-kitsune": by_kitsune,
}


def model_of(name: str, make: zoo.Maker) -> dict[str, Any]:
    """All cases of a model; what failed says how."""
    rows: dict[str, Any] = {}
    places: tuple[str, ...] = ()
    for case in CASES:
        torch.manual_seed(0)
        try:
            sample = make()
            again = case.endswith("recomputed")
            applied = recomputation(sample.model, places) if again else None
            rows[case], found = case_of(sample, case)
            places = places if again else found or places
            if applied is not None:
                applied.revert()
            told = f"{rows[case]['error']:+.3%} of {rows[case]['measured'] / 2**20:.0f} MiB"
        except Exception as error:
            rows[case] = {"failed": f"{type(error).__name__}: {error}"[:300]}
            told = rows[case]["failed"]
        print(f"{name:<24} {case:<16} {told}", flush=True)
        sample = applied = None  # type: ignore[assignment]
        gc.collect()
    for case in CASES[len(KINDS) :]:
        rows[case]["places"] = list(places)
    return rows


def add_rivals(rows: dict[str, Any], make: zoo.Maker) -> None:
    """What the others estimate; what they raise instead. They leave hooks behind, so they come last."""
    for case, row in rows.items():
        again = case.endswith("recomputed")
        if "error" not in row:
            continue
        row["others"] = {}
        for name, rival in RIVALS.items():
            if again and rival is not by_mem_tracker:
                continue
            torch.manual_seed(0)
            sample = make()
            sample.model.train(not case.startswith("eval"))
            try:
                if again:
                    recomputation(sample.model, tuple(row["places"]))
                row["others"][name] = rival(sample, case)
            except Exception as error:
                row["others"][name] = f"{type(error).__name__}: {error}"[:120]


def summary_of(models: dict[str, Any]) -> dict[str, Any]:
    """Median and worst error of the rows that ran, ours and the others'."""
    rows = [row for cases in models.values() for row in cases.values() if "error" in row]
    errors = [abs(row["error"]) for row in rows]
    others: dict[str, list[float]] = {name: [] for name in RIVALS}
    for row in rows:
        for name, value in row.get("others", {}).items():
            if isinstance(value, int):
                others[name].append(abs(value / row["measured"] - 1))
    return {
        "models": len(models),
        "rows": len(rows),
        "failed": sum(len(cases) for cases in models.values()) - len(rows),
        "median": statistics.median(errors) if errors else None,
        "worst": max(errors, default=None),
        "exact": all(row["exact"] for row in rows),
        "others": {
            name: {"rows": len(v), "median": statistics.median(v), "worst": max(v)}
            for name, v in others.items()
            if v
        },
    }


def main() -> None:
    """Run and print; with `--save` each model's rows are kept as soon as they are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--set", choices=zoo.SETS, nargs="*", default=list(zoo.SETS))
    parser.add_argument("--part", choices=PARTS, nargs="*", default=PARTS)
    parser.add_argument("--save", action="store_true", help="beside the models that ran before")
    options = parser.parse_args()
    torch.set_num_threads(1)
    zoo.import_libraries()
    gc.collect()
    gc.freeze()
    chosen = {name: make for title in options.set for name, make in zoo.SETS[title].items()}
    models = {name: make for name, make in chosen.items() if name in (options.only or chosen)}
    ran: dict[str, Any] = kept() if options.save else {}
    for name, make in models.items() if "models" in options.part else ():
        ran[name] = model_of(name, make)
        results = in_sets(ran, save=options.save)
    for name, make in models.items() if "others" in options.part else ():
        add_rivals(ran.get(name, {}), make)
        results = in_sets(ran, save=options.save)
    print(json.dumps(results["summary"], indent=1))


def kept() -> dict[str, Any]:
    """The rows of the models that ran before."""
    path = machine.RESULTS / machine.slug() / "estimates.json"
    found: dict[str, Any] = json.loads(path.read_text()).get("models", {}) if path.exists() else {}
    return found


def in_sets(ran: dict[str, Any], *, save: bool) -> dict[str, Any]:
    """The rows in the zoo's order, with what they come to, for all and for each set."""
    rows = {name: ran[name] for models in zoo.SETS.values() for name in models if name in ran}
    sets = {title: {n: rows[n] for n in models if n in rows} for title, models in zoo.SETS.items()}
    results = {
        "summary": summary_of(rows),
        "sets": {title: summary_of(found) for title, found in sets.items() if found},
        "models": rows,
    }
    if save:
        machine.save("estimates", results)
    return results


if __name__ == "__main__":
    main()
