"""What is simulated of a recorded step against what is measured when it is done."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from steps import STEPS, ConvNet, fitting, images, squared, trial
from torchtrim import TrainStep
from torchtrim.executor.registry import Option, technique
from torchtrim.planner.plans import build_plan
from torchtrim.records.plan import Plan, Prediction, Technique
from torchtrim.step.edits import overwritten
from torchtrim.step.from_profile import step_of
from torchtrim.step.rerun import rerun
from torchtrim.step.simulate import simulate
from torchtrim.step.step import Span


def plan_of(options: list[Option]) -> Plan:
    return build_plan(
        "",
        fingerprint={},
        techniques=tuple(
            Technique(name=name, where=tuple(o.where for o in options if o.technique == name))
            for name in dict.fromkeys(o.technique for o in options)
        ),
        predicted=Prediction(peak_bytes=0, step_seconds=0.0),
        budget_bytes=1,
    )


def apart(options: list[Option], count: int, seed: int) -> list[Option]:
    """Some options whose spans do not overlap."""
    chosen: list[Option] = []
    for option in random.Random(seed).sample(options, len(options)):
        spans = [s for o in chosen for s in o.spans]
        clash = any(a.first < b.last and b.first < a.last for a in option.spans for b in spans)
        if not clash and len(chosen) < count:
            chosen.append(option)
    return chosen


@pytest.mark.parametrize("name", STEPS)
def test_nothing_chosen_is_the_original(name: str) -> None:
    torch.manual_seed(0)
    found, profile = trial(STEPS[name]())
    assert simulate(step_of(profile)).peak_bytes == pytest.approx(found.peak_bytes, rel=1e-3)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_is_simulated_is_measured(name: str, seed: int) -> None:
    """Recomputation at random places, together with all that may overwrite."""
    torch.manual_seed(0)
    workload = STEPS[name]()
    found, profile = trial(workload)
    step = step_of(profile)
    bias = found.peak_bytes - simulate(step).peak_bytes
    free = list(technique("overwrite").options(step)) if seed > 1 else []
    step = overwritten(step, [span.first for option in free for span in option.spans])
    unit = technique("recompute")
    chosen = apart(list(unit.options(step)), seed + 1, seed)
    edits = [edit for one in chosen if (edit := unit.edits(step, one)) is not None]
    predicted = simulate(step, edits).peak_bytes + bias
    planned = fitting(workload, steps=1).run_planned(plan_of([*free, *chosen]))
    assert predicted == pytest.approx(planned.peak_bytes, rel=1e-3)


def test_a_span_without_backward_changes_nothing() -> None:
    torch.manual_seed(0)
    step = step_of(trial(STEPS["blocks"]())[1])
    count = len(step.tasks)
    assert rerun(step, [Span(count - 1, count)]) is None


def evaluated_too(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A loss beside an evaluation with gradients on, whose graph nobody uses."""
    seen = model(batch)
    loss = squared(model, batch)
    del seen
    return loss


def test_a_graph_without_backward_is_not_kept() -> None:
    """Running again lets go of it, and never runs it again."""
    torch.manual_seed(0)
    model = ConvNet()
    optimizer = torch.optim.Adam(model.parameters())
    workload = TrainStep(model, evaluated_too, optimizer, images())
    found, profile = trial(workload)
    step = step_of(profile)
    blocks = [o for o in technique("recompute").options(step) if o.where.count(".") == 2]
    assert blocks
    edits = [edit for o in blocks if (edit := technique("recompute").edits(step, o)) is not None]
    unused = [span for o in blocks for span in o.spans if not rerun(step, [span]).blocks[1:]]
    predicted = simulate(step, edits).peak_bytes
    assert len(unused) == len(blocks)
    assert predicted < 0.6 * simulate(step).peak_bytes
    planned = fitting(workload, steps=1).run_planned(plan_of(blocks))
    bias = found.peak_bytes - simulate(step).peak_bytes
    assert predicted + bias == pytest.approx(planned.peak_bytes, rel=1e-3)
