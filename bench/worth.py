"""When a fixed-shape form is worth it: over the share of a mask and the size of what it selects from.

    python -m bench.worth [--save]

A step of training with a loss over the selected pixels, as it was written and as the fix writes it. Both
are recorded on an emulated A100 and modelled as whole steps; the choice is that of `torchtrim optimize`,
and is right where it agrees with the two steps. Where the host gives out operators more slowly than the
device runs them neither form matters, and the model, which takes a selection by a mask for one operator,
cannot tell. Beside it stands what both take on this CPU, where nothing waits.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torchtrim
from bench.machine import save
from torchtrim.capture.probes import Probes
from torchtrim.emulator import emulate
from torchtrim.rewriter.edits import patch
from torchtrim.rewriter.fix import matches
from torchtrim.source.facts import Facts
from torchtrim.source.source import SourceFile
from torchtrim.workflows.fix_attempt import costs_more, modelled

SHARES = (0.001, 0.01, 0.1, 0.5, 0.9)
SIZES = (128, 512, 1024)
CLASSES = 32
FIXES = ("masked_cross_entropy", "masked_reduction")
ROUNDS = 3
HOST_BOUND = 0.8
FORMS = {
    "cross entropy": "F.cross_entropy(scores[mask], labels[mask])",
    "mean": "scores[mask].square().mean()",
}
STEP = """
import torch
from torch.nn import functional as F

def loss_of(scores, labels, mask):
    return {loss}

def step(model, images, labels, mask):
    for parameter in model.parameters():
        parameter.grad = None
    loss_of(model(images).permute(0, 2, 3, 1), labels, mask).backward()
"""


def inputs(share: float, size: int) -> tuple[Any, ...]:
    """A model and a batch; on the device that is emulated, else on the CPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = torch.nn.Conv2d(8, CLASSES, 1).to(device)
    shape = (1, size, size)
    return (
        model,
        torch.randn(1, 8, size, size).to(device),
        torch.randint(CLASSES, shape).to(device),
        (torch.rand(shape) < share).to(device),
    )


def fixed(before: str) -> str:
    """The step after the fix, by the evidence of a run on the emulated device."""
    source = SourceFile("worth_before.py", before)
    match = next(one for one in matches(source) if one.fix.name in FIXES)
    probes = Probes([match.probe(0)])
    probes.install()
    try:
        tree = probes.instrument(source.path, ast.parse(before))
        space: dict[str, Any] = {}
        exec(compile(tree, source.path, "exec"), space)
        with emulate():
            space["step"](*inputs(0.5, 16))
    finally:
        probes.remove()
    rewrite = match.fix.rewrite(match, Facts(*probes.observed()))
    return patch(source, [rewrite]).text


def step_of(text: str, path: str) -> Callable[..., None]:
    """The code's `step`, as if it stood in a file of that name."""
    space: dict[str, Any] = {}
    exec(compile(text, path, "exec"), space)
    found: Callable[..., None] = space["step"]
    return found


def recorded(text: str, share: float, size: int) -> Any:
    """The profile of the step on the emulated device."""
    path = str(Path("bench/worth_step.py").resolve())
    step = step_of(text, path)
    there: list[Any] = []

    def call() -> None:
        if not there:
            there.extend(inputs(share, size))
        step(*there)

    return torchtrim.measure(call, warmup=1).profile


def on_this_cpu(texts: tuple[str, str], share: float, size: int) -> tuple[float, float]:
    """Seconds of both steps here, in turns; the medians."""
    steps = [step_of(text, "here.py") for text in texts]
    given = inputs(share, size)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for kept, step in zip(times, steps, strict=True):
            begin = time.perf_counter()
            step(*given)
            kept.append(time.perf_counter() - begin)
    return statistics.median(times[0]), statistics.median(times[1])


def measure(form: str, share: float, size: int) -> dict[str, Any]:
    """One point: both forms modelled and here, what is chosen and whether that is right."""
    before = STEP.format(loss=FORMS[form])
    after = fixed(before)
    one, other = recorded(before, share, size), recorded(after, share, size)
    was, now = modelled(one), modelled(other)
    assert was is not None
    assert now is not None
    here = on_this_cpu((before, after), share, size)
    made = not costs_more(other, one)
    return {
        "form": form,
        "share": share,
        "size": size,
        "as_written_ms": round(was.step_ms, 4),
        "fixed_ms": round(now.step_ms, 4),
        "busy_ms": [round(was.device_busy_ms, 4), round(now.device_busy_ms, 4)],
        "waits": [len(one.syncs), len(other.syncs)],
        "made": made,
        "host_bound": was.device_busy_ms < HOST_BOUND * was.step_ms,
        "right": made == (now.step_ms <= was.step_ms),
        "cpu_ratio": round(here[1] / here[0], 2),
    }


def _told(row: dict[str, Any]) -> str:
    return "host-bound" if row["host_bound"] else "yes" if row["right"] else "no"


def main() -> None:
    """Print the table; with `--save`, keep it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows = [measure(*point) for point in itertools.product(FORMS, SHARES, SIZES)]
    print(
        "form            share  size   as written       fixed   choice      right  here, fixed/written"
    )
    for row in rows:
        print(
            f"{row['form']:14} {row['share']:6} {row['size']:5} {row['as_written_ms']:9.4f} ms "
            f"{row['fixed_ms']:8.4f} ms   {'fix' if row['made'] else 'leave':6} "
            f"{_told(row):>10} {row['cpu_ratio']:8.2f}"
        )
    bound = [row for row in rows if not row["host_bound"]]
    right = sum(row["right"] for row in bound)
    print(
        f"{right} of {len(bound)} choices are right, {len(rows) - len(bound)} steps are host-bound"
    )
    if options.save:
        print(save("worth", {"rows": rows, "right": right}))


if __name__ == "__main__":
    main()
