"""Linear and cross entropy in chunks: peak and time of forward and backward, beside PyTorch's own.

    python -m bench.head

Peaks are the CPU allocator's, over what was there before. Rounds go by turns; of some the fastest are few.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import profiler

from bench.machine import save, with_spread
from torchtrim.techniques.head.ops import linear_cross_entropy

SHAPES = ((2048, 256, 32768), (4096, 512, 65536))
ROUNDS = 7
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _reference(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target)


def losses() -> dict[str, Loss]:
    """The reference, ours, and PyTorch's own chunks where this version has them: its default is 8 rows."""
    found: dict[str, Loss] = {"linear, cross_entropy": _reference}
    for rows in (128, 256, 512):
        found[f"torchtrim, {rows} rows"] = lambda x, w, y, rows=rows: linear_cross_entropy(  # type: ignore[misc]
            x, w, y, rows=rows
        )
    own: Any = getattr(F, "linear_cross_entropy", None)
    options: Any = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    options = options or getattr(F, "LinearCrossEntropyOptions", None)
    if own is not None and options is not None:
        found["torch, its default"] = lambda x, w, y: own(x, w, y, options=options())
        found["torch, 256 rows"] = lambda x, w, y: own(
            x, w, y, options=options(batch_chunk_size=256)
        )
    return found


def seconds(loss: Loss, given: tuple[Tensor, Tensor, Tensor]) -> float:
    """Of one forward and backward."""
    hidden, weight = (x.clone().requires_grad_() for x in given[:2])
    begin = time.perf_counter()
    loss(hidden, weight, given[2]).backward()  # type: ignore[no-untyped-call]
    return time.perf_counter() - begin


def peak(loss: Loss, given: tuple[Tensor, Tensor, Tensor]) -> int:
    """Bytes over those that were there before."""
    hidden, weight = (x.clone().requires_grad_() for x in given[:2])
    with profiler.profile(profile_memory=True) as watched:
        loss(hidden, weight, given[2]).backward()  # type: ignore[no-untyped-call]
    results: Any = watched.kineto_results
    events = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(size for _, size in sorted(events)))


def measure(shape: tuple[int, int, int]) -> dict[str, Any]:
    """Peak in MiB and milliseconds of each."""
    torch.manual_seed(0)
    rows, width, classes = shape
    hidden, weight = torch.randn(rows, width), torch.randn(classes, width) / 16
    given = (hidden, weight, torch.randint(0, classes, (rows,)))
    every = losses()
    peaks = {name: round(peak(loss, given) / 2**20, 1) for name, loss in every.items()}
    times: dict[str, list[float]] = {name: [] for name in every}
    for number in range(ROUNDS):
        for name, loss in every.items():
            if number < 2 or "its default" not in name:
                times[name].append(1e3 * seconds(loss, given))
    return {
        "shape": {"rows": rows, "width": width, "classes": classes},
        "losses": {
            name: {
                "peak_mib": peaks[name],
                "rounds": len(times[name]),
                "ms": with_spread(times[name]),
            }
            for name in every
        },
    }


def main() -> None:
    """Measure all shapes, and save."""
    results = []
    for shape in SHAPES:
        results.append(measure(shape))
        for name, found in results[-1]["losses"].items():
            print(f"{shape} {name:24} {found['peak_mib']:>8} MiB {found['ms']}")
    save("head", {"results": results})


if __name__ == "__main__":
    main()
