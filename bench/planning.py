"""How long planning takes: one option more or less, and a whole front, by the number of operators. And what
running again takes besides the operators themselves, which the simulator's `Overhead` is set to.

    python -m bench.planning

Steps are chains of small blocks with their backward; each block, and each two in a row, may run again.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import torch
from torch import nn

from bench.machine import save
from torchtrim.planner.problem import Problem
from torchtrim.planner.solvers.local import Local
from torchtrim.step.edits import Edit
from torchtrim.step.incremental import Simulation
from torchtrim.step.rerun import rerun
from torchtrim.step.step import Hold, Span, Step, Task, Tensor
from torchtrim.techniques.base import Option
from torchtrim.techniques.rerun import rerun_whole

BLOCKS = (250, 2500)
ROUNDS = 5
KB = 1024
SPANS = 20


def chain(rng: random.Random, blocks: int) -> tuple[Step, list[Edit]]:
    """A step of so many blocks of one to three operators, and the edits of running them again."""
    sizes = [rng.randrange(1, 4) for _ in range(blocks)]
    count = sum(sizes)
    tasks, tensors = [], [Tensor(KB, "input", "device", -1, (Hold(2 * count),))]
    for index in range(count):
        size, asked = rng.randrange(1, 100) * KB, 2 * count - 1 - index
        saver = Hold(asked + 1, index, index, asked)
        tensors.append(Tensor(size, "activation", "device", index, (Hold(index + 2), saver)))
        seconds = rng.random() / 1000
        reads, makes = (index,), (index + 1,)
        tasks.append(Task("aten::f", "forward", -1, reads, makes, (), size, seconds))
    for of in reversed(range(count)):
        tasks.append(Task("aten::b", "backward", of, (of + 1,), (), (), KB, 0.001))
    step = Step(tuple(tasks), tuple(tensors))
    ends = [sum(sizes[:number]) for number in range(blocks + 1)]
    spans = [Span(ends[a], ends[a + n]) for n in (1, 2) for a in range(blocks + 1 - n)]
    return step, [edit for span in spans if (edit := rerun(step, [span])) is not None]


def measure(blocks: int) -> dict[str, Any]:
    """Seconds of a front, and microseconds of one changed option with the peak that follows."""
    step, edits = chain(random.Random(0), blocks)
    options = [Option("recompute", str(number)) for number in range(len(edits))]
    fronts, switches = [], []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        problem = Problem(step, options, edits)
        Local().solve(problem)
        fronts.append(time.perf_counter() - begin)
        simulation = Simulation(step, edits)
        begin = time.perf_counter()
        for number in range(len(edits)):
            simulation.switch([number])
            _ = simulation.peak_bytes
        switches.append((time.perf_counter() - begin) / len(edits) * 1e6)
    return {
        "operators": len(step.tasks),
        "options": len(edits),
        "front_seconds": round(statistics.median(fronts), 3),
        "switch_us": round(statistics.median(switches), 1),
        "switch_us_worst": round(max(switches), 1),
        "sets_tried": problem.tried,
    }


class Tiny(nn.Module):
    """So many operators that take next to no time."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sigmoid of the sigmoid, and so on."""
        for _ in range(self.count):
            x = torch.sigmoid(x)
        return x


def overhead() -> dict[str, float]:
    """Microseconds a span and an operator that run again, by a line through spans of several lengths.

    The least of many rounds, plain and rerun by turns, since whatever else runs can only add.
    """
    x = torch.randn(4, 8, requires_grad=True)
    lengths, added = (1, 2, 4, 8, 16), []
    for count in lengths:
        plain, rerun_ = (nn.Sequential(*(Tiny(count) for _ in range(SPANS))) for _ in range(2))
        for block in rerun_:
            rerun_whole(block)
        rounds = [(_seconds(plain, x), _seconds(rerun_, x)) for _ in range(80)]
        least, least_again = (min(times) for times in zip(*rounds, strict=True))
        added.append((least_again - least) / SPANS * 1e6)
    slope, start = statistics.linear_regression(lengths, added)
    return {"span_us": round(start), "operator_us": round(slope, 1)}


def _seconds(model: nn.Module, x: torch.Tensor) -> float:
    begin = time.perf_counter()
    model(x).sum().backward()
    return time.perf_counter() - begin


def main() -> None:
    """Both sizes, and the overhead."""
    torch.set_num_threads(1)
    found = {"steps": [measure(blocks) for blocks in BLOCKS], "overhead": overhead()}
    save("planning", found)
    print(found)


if __name__ == "__main__":
    main()
