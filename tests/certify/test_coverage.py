"""What a verdict was shown for."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import torchtrim
from torchtrim.certify.coverage import coverage_of
from torchtrim.records.trial import Request
from torchtrim.runner.trials import run_trial


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.net(x) * ids


def test_a_trial_says_its_shapes_types_modes_and_steps(tmp_path: Path) -> None:
    model = Gate()
    few, many = ((torch.ones(n, 5, 3), torch.ones((), dtype=torch.int64)) for n in (2, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torchtrim.TrainStep(
        model, lambda model, batch: model(*batch).sum(), optimizer, few, second_batch=many
    )
    found = coverage_of(run_trial(step, Request(steps=2), tmp_path))
    assert found.inputs == ("Gate: float32[2, 5, 3], int64[]", "Gate: float32[4, 5, 3], int64[]")
    assert found.dtypes == ("float32", "int64")
    assert found.batch_sizes == (2, 4)
    assert found.dimensions == (0, 3)
    assert found.modes == ("training",)
    assert (found.steps, found.device, found.processes) == (4, "cpu", (0,))
