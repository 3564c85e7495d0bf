"""Plans on live modules: techniques that share a module all act, whatever their order in the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from steps import fitting, train_step
from torchtrim.emulator import emulate
from torchtrim.executor.apply import apply_plan
from torchtrim.records.budget import Budget
from torchtrim.records.plan import Plan, Prediction, Technique
from torchtrim.techniques.offload_activations.moving import MovedStorage


@pytest.mark.parametrize("order", [1, -1])
def test_a_range_of_a_sequential_leaves_what_watches_the_whole_of_it(order: int) -> None:
    torch.manual_seed(0)
    blocks = [m for _ in range(2) for m in (nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8), nn.SiLU())]
    tried = fitting(train_step(nn.Sequential(*blocks), torch.randn(16, 8, 512)), 1)
    original = tried.observe()
    plain = tried.planner(original).unchanged(Budget(original.peak_bytes))
    whole = Technique(name="replay", where=("Sequential:batch_norm.0",))
    part = Technique(name="recompute", where=("Sequential[3:6]",))

    def peak(*techniques: Technique) -> int:
        return tried.run_planned(replace(plain, techniques=techniques)).peak_bytes

    # The last of the blocks is the first that runs again, so what it saves is not at the peak.
    assert peak(*(whole, part)[::order]) < peak(part) <= original.peak_bytes


@pytest.mark.parametrize("order", [1, -1])
def test_activations_are_offloaded_around_what_reruns_in_the_same_module(
    order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[MovedStorage] = []
    init = MovedStorage.__init__

    def noted(self: MovedStorage, *args: Any) -> None:
        moved.append(self)
        init(self, *args)

    monkeypatch.setattr(MovedStorage, "__init__", noted)
    place = "Sequential:gelu.0 until addmm.1 from addmm.1"
    several = (
        Technique(name="offload_activations", where=(place,)),
        Technique(name="replay", where=("Sequential:addmm.0",)),
    )
    plan = Plan(
        torchtrim="0.1.0",
        script="",
        fingerprint={},
        budget_bytes=1,
        techniques=several[::order],
        predicted=Prediction(peak_bytes=1, step_seconds=1.0),
    )
    with emulate():
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 9)).cuda()
        apply_plan(plan, {"Sequential": model})
        model(torch.randn(64, 64, device="cuda")).sum().backward()
    assert len(moved) == 1
