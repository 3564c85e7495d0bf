"""How long planning takes: one option more or less, and a whole front, by the number of operators; and a plan
of a real decoder of 10,000 operators with all that can be done in it. And what running again takes besides
the operators themselves on this machine.

    python -m bench.planning

Steps are chains of small blocks with their backward; each block, and each two in a row, may run again. Times
are the processor's, in one thread.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import msgspec
import torch
from tests.cases import zoo

from bench.machine import save
from torchtrim import TrainStep
from torchtrim.analysis.timeline import by_kind, peak_operator
from torchtrim.executor.overheads import measured
from torchtrim.executor.registry import Option
from torchtrim.planner.planner import Planner
from torchtrim.planner.problem import Problem
from torchtrim.planner.solvers.search import search
from torchtrim.records.budget import Budget
from torchtrim.records.trial import Request
from torchtrim.step.edits import Edit
from torchtrim.step.incremental import Simulation
from torchtrim.step.rerun import rerun
from torchtrim.step.step import Hold, Span, Step, Task, Tensor
from torchtrim.workflows.optimize.fitting import Fitting

BLOCKS = (250, 2500)
ROUNDS = 5
KB = 1024
LAYERS = 38
_NARROW = {"n_positions": 64, "vocab_size": 500, "n_embd": 32, "n_head": 2}


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
        begin = time.process_time()
        problem = Problem(step, options, edits)
        search(problem)
        fronts.append(time.process_time() - begin)
        simulation = Simulation(step, edits)
        begin = time.process_time()
        for number in range(len(edits)):
            simulation.switch([number])
            _ = simulation.peak_bytes
        switches.append((time.process_time() - begin) / len(edits) * 1e6)
    return {
        "operators": len(step.tasks),
        "options": len(edits),
        "front_seconds": round(statistics.median(fronts), 3),
        "switch_us": round(statistics.median(switches), 1),
        "switch_us_worst": round(max(switches), 1),
        "sets_tried": len(problem.known),
    }


def planned(layers: int) -> dict[str, Any]:
    """A plan for half of what activations take in a decoder, from its profile on."""
    make = zoo.transformer("GPT2", "CausalLM", 64, 2, **{**_NARROW, "n_layer": layers})
    sample = make()
    optimizer = torch.optim.AdamW(sample.model.parameters(), 1e-4)
    work = TrainStep(sample.model.train(), sample.loss, optimizer, sample.batch)
    fitting = Fitting(work, Request(steps=2), lambda _: None)
    profile = fitting.observe().profile
    assert profile is not None
    kept = by_kind(profile, peak_operator(profile)).get("activation", 0)
    begin = time.process_time()
    planner = Planner(profile, step_seconds=profile.step_seconds, fingerprint={})
    plan = planner.plan(Budget(int(profile.peak_bytes - kept / 2)))
    return {
        "operators": len(profile.operators),
        "seconds": round(time.process_time() - begin, 2),
        "gap": plan.gap,
        "techniques": {one.name: len(one.where) for one in plan.techniques},
    }


def main() -> None:
    """Both sizes, a decoder, and the overheads."""
    torch.set_num_threads(1)
    zoo.import_libraries()
    found = {
        "steps": [measure(blocks) for blocks in BLOCKS],
        "decoder": planned(LAYERS),
        "overheads": {
            f"{name}_us": round(seconds * 1e6, 1)
            for name, seconds in msgspec.structs.asdict(measured()).items()
        },
    }
    save("planning", found)
    print(found)


if __name__ == "__main__":
    main()
