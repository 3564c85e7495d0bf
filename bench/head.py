"""Linear and cross entropy in chunks: peak and time of forward and backward, beside PyTorch's and Liger's.

    pip install --no-deps liger-kernel
    python -m bench.head [ROWS ...]

Peaks are the CPU allocator's, over what was there before; times are CPU seconds of the process, so that
others on the machine count little. Rounds go by turns. PyTorch's default takes 8 rows at a time and minutes,
so its time is that of the run that measured its peak. Liger's kernels are Triton's and run on the CPU only in
Triton's interpreter, so it has a peak and no time.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import profiler

from bench.machine import RESULTS, save, slug, with_spread
from torchtrim.techniques.chunked_loss.ops import linear_cross_entropy

SHAPES = ((2048, 256, 32768), (4096, 512, 65536))
LESS = (8, 10)
"""By how much ours is to need less, at no more time."""
ROUNDS = 5
REFERENCE, OURS = "linear, cross_entropy", "torchtrim, 256 rows"
DEFAULT, LIGER = "torch, its default", "liger, interpreted"
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _reference(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target)


def losses() -> dict[str, Loss]:
    """The reference, ours, and PyTorch's own chunks where this version has them: its default is 8 rows."""
    found: dict[str, Loss] = {REFERENCE: _reference}
    for rows in (128, 256, 512):
        found[f"torchtrim, {rows} rows"] = lambda x, w, y, rows=rows: linear_cross_entropy(  # type: ignore[misc]
            x, w, y, rows=rows
        )
    own: Any = getattr(F, "linear_cross_entropy", None)
    options: Any = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    options = options or getattr(F, "LinearCrossEntropyOptions", None)
    if own is not None and options is not None:
        found[DEFAULT] = lambda x, w, y: own(x, w, y, options=options())
        found["torch, 256 rows"] = lambda x, w, y: own(
            x, w, y, options=options(batch_chunk_size=256)
        )
    return found | _liger()


def _liger() -> dict[str, Loss]:
    """Liger's, if it is there."""
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        module = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    except ImportError as error:
        print(f"without Liger: {error}")
        return {}
    return {LIGER: lambda x, w, y: module.LigerFusedLinearCrossEntropyFunction.apply(x, w, y)[0]}


def seconds(loss: Loss, given: tuple[Tensor, Tensor, Tensor]) -> float:
    """Of one forward and backward."""
    hidden, weight = (x.clone().requires_grad_() for x in given[:2])
    begin = time.process_time()
    loss(hidden, weight, given[2]).backward()  # type: ignore[no-untyped-call]
    return time.process_time() - begin


def peak(loss: Loss, given: tuple[Tensor, Tensor, Tensor]) -> tuple[int, float]:
    """Bytes over those that were there before, and the seconds it took."""
    hidden, weight = (x.clone().requires_grad_() for x in given[:2])
    begin = time.process_time()
    with profiler.profile(profile_memory=True) as watched:
        loss(hidden, weight, given[2]).backward()  # type: ignore[no-untyped-call]
    taken = time.process_time() - begin
    results: Any = watched.kineto_results
    events = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(size for _, size in sorted(events))), taken


def measure(shape: tuple[int, int, int]) -> dict[str, Any]:
    """Peak in MiB and milliseconds of each."""
    torch.manual_seed(0)
    rows, width, classes = shape
    hidden, weight = torch.randn(rows, width), torch.randn(classes, width) / 16
    given = (hidden, weight, torch.randint(0, classes, (rows,)))
    every = losses()
    found = {name: peak(loss, given) for name, loss in every.items()}
    peaks = {name: round(size / 2**20, 1) for name, (size, _) in found.items()}
    times: dict[str, list[float]] = {name: [] for name in every}
    for _, (name, loss) in itertools.product(range(ROUNDS), every.items()):
        if name not in (DEFAULT, LIGER):
            times[name].append(1e3 * seconds(loss, given))
    return {
        "shape": {"rows": rows, "width": width, "classes": classes},
        "losses": {
            name: {
                "peak_mib": peaks[name],
                "rounds": len(times[name]),
                "ms": with_spread(times[name]) if times[name] else None,
                "once_ms": round(1e3 * found[name][1]) if name == DEFAULT else None,
            }
            for name in every
        },
        "times_less_peak": round(peaks[REFERENCE] / peaks[OURS], 2),
        "of_its_time": round(
            statistics.median(times[OURS]) / statistics.median(times[REFERENCE]), 3
        ),
    }


def main() -> None:
    """Measure the shapes of these numbers of rows, or all; keep the results of the others."""
    path = RESULTS / slug() / "head.json"
    known = json.loads(path.read_text())["results"] if path.exists() else []
    for shape, goal in zip(SHAPES, LESS, strict=True):
        if sys.argv[1:] and str(shape[0]) not in sys.argv:
            continue
        one = measure(shape)
        known = [*(other for other in known if other["shape"] != one["shape"]), one]
        for name, found in one["losses"].items():
            print(f"{shape} {name:24} {found['peak_mib']:>8} MiB {found['ms'] or found['once_ms']}")
        less, share = one["times_less_peak"], one["of_its_time"]
        print(f"{less} times less peak (goal {goal}), {share} of the time (goal 1)", flush=True)
        save("head", {"results": known})


if __name__ == "__main__":
    main()
