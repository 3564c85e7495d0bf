"""Steps that a run adds for the times of operators: no script needs them, and none is failed by them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from torchtrim.capture.workload import TrainStep
from torchtrim.records.trial import Request, Trial
from torchtrim.runner.script import Script
from torchtrim.runner.trials import run_trial

TRAIN = """
import sys, time
import torch
from torch import nn
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
steps, then = int(sys.argv[1]), sys.argv[2]
for step in range(steps):
    if step == 5 and then == "raise":
        raise ValueError("after the steps that are compared")
    if step == 5 and then == "sleep":
        time.sleep(4)
    loss = model(torch.ones(4, 8)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, flush=True)
"""


def ran(tmp_path: Path, steps: int, then: str = "") -> Trial:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    made = Script(str(script), args=(str(steps), then))
    return run_trial(made, Request(steps=2, times=2), tmp_path)


def recorded_steps(trial: Trial) -> int:
    assert trial.profile is not None
    return trial.profile.recorded_steps


def test_a_script_that_goes_on_is_timed_for_two_steps_more(tmp_path: Path) -> None:
    trial = ran(tmp_path, 20)
    assert recorded_steps(trial) == 3
    assert trial.profile is not None
    assert any(op.spread for op in trial.profile.operators)
    assert len(trial.steps) == 4
    assert (trial.forwards, trial.backwards, trial.optimizer_steps) == (4, 4, 4)


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "then"), [(4, ""), (20, "raise"), (20, "sleep")])
def test_one_that_ends_fails_or_waits_has_all_its_steps(
    tmp_path: Path, steps: int, then: str
) -> None:
    trial = ran(tmp_path, steps, then)
    assert trial.crash is None
    assert len(trial.steps) == 4
    assert recorded_steps(trial) <= 2


def test_a_live_step_runs_twice_more_and_is_put_back(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    calls: list[int] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        if len(calls) > most:
            raise ValueError("no more")
        result: torch.Tensor = model(batch).sum()
        return result

    step = TrainStep(model, loss, torch.optim.SGD(model.parameters(), 0.1), torch.ones(3, 4))
    for most, recorded in ((99, 3), (4, 1)):
        calls.clear()
        trial = run_trial(step, Request(steps=2, times=2), tmp_path)
        assert len(trial.steps) == 4
        assert recorded_steps(trial) == recorded
        assert len(calls) == min(6, most + 1)
    for one, other in zip(before, model.parameters(), strict=True):
        assert torch.equal(one, other)
