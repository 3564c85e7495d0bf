"""When a fixed-shape form is worth it: over the share of a mask and the size of what it selects from.

    python -m bench.worth [--save]

A step of training with a loss over the selected pixels, as it was written and as the cure writes it. Both
are recorded on an emulated A100 and modelled as whole steps; the choice is that of `torchtrim optimize`.
Beside it stands what both take on this CPU, where nothing waits: what the dense form costs in itself.
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
from torchtrim.certify.worth import costs_more, growth_ms, modelled_step_ms
from torchtrim.observe.emulated import emulate
from torchtrim.observe.probes import Probes
from torchtrim.rewrite.edits import patch
from torchtrim.rewrite.facts import Facts
from torchtrim.rewrite.registry import matches
from torchtrim.rewrite.source import Source

SHARES = (0.001, 0.01, 0.1, 0.5, 0.9)
SIZES = (32, 128, 512)
CLASSES = 32
ROUNDS = 3
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


def cured(before: str) -> tuple[str, tuple[int, int], Any]:
    """The step after the cure, by the evidence of a run on the emulated device; its lines."""
    source = Source("worth_before.py", before)
    (match,) = matches(source)
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
    fix = match.cure.fix(match, Facts(*probes.observed()))
    patched = patch(source, [fix])
    return patched.text, match.lines, patched.regions[0]


def step_of(text: str, path: str) -> Callable[..., None]:
    """The code's `step`, as if it stood in a file of that name."""
    space: dict[str, Any] = {}
    exec(compile(text, path, "exec"), space)
    found: Callable[..., None] = space["step"]
    return found


def modelled(text: str, share: float, size: int) -> Any:
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
    after, lines, spans = cured(before)
    one, other = modelled(before, share, size), modelled(after, share, size)
    project = Path.cwd()
    path = str(Path("bench/worth_step.py").resolve())
    region = (path, *lines), [(path, *span) for span in spans]
    (grown,) = growth_ms(one, other, [region], project)
    was, now = modelled_step_ms(one), modelled_step_ms(other)
    assert was is not None
    assert now is not None
    here = on_this_cpu((before, after), share, size)
    made = not costs_more(other, one, grown)
    return {
        "form": form,
        "share": share,
        "size": size,
        "as_written_ms": round(was, 4),
        "cured_ms": round(now, 4),
        "grown_ms": round(grown, 4),
        "waits": [len(one.syncs), len(other.syncs)],
        "made": made,
        "right": made == (now <= was * 1.002),
        "cpu_ratio": round(here[1] / here[0], 2),
    }


def main() -> None:
    """Print the table; with `--save`, keep it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows = [measure(*point) for point in itertools.product(FORMS, SHARES, SIZES)]
    print("form            share  size   as written       cured   choice      right  here, cured/written")
    for row in rows:
        print(
            f"{row['form']:14} {row['share']:6} {row['size']:5} {row['as_written_ms']:9.4f} ms "
            f"{row['cured_ms']:8.4f} ms   {'cure' if row['made'] else 'leave':6} "
            f"{'yes' if row['right'] else 'no':>9} {row['cpu_ratio']:8.2f}"
        )
    right = sum(row["right"] for row in rows)
    print(f"{right} of {len(rows)} choices are right")
    if options.save:
        print(save("worth", {"rows": rows, "right": right}))


if __name__ == "__main__":
    main()
