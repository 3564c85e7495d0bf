"""The host's memory has a budget of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchtrim
from steps import squared
from torchtrim.capture.workload import TrainStep
from torchtrim.costs.devices import device_named
from torchtrim.emulator import emulate
from torchtrim.executor.registry import Option, technique
from torchtrim.planner.planner import Planner
from torchtrim.records.budget import Budget
from torchtrim.records.profile import Profile
from torchtrim.step.edits import host_peak
from torchtrim.step.from_profile import on_device, step_of


@pytest.fixture(scope="module")
def profile() -> Profile:
    with emulate():
        torch.manual_seed(0)
        inner = [part for _ in range(4) for part in (nn.Linear(64, 64), nn.GELU())]
        model = nn.Sequential(*inner).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        return torchtrim.record(
            TrainStep(model, squared, optimizer, torch.randn(2048, 64, device="cuda"))
        )


def planner_of(profile: Profile, host: int | None, *exclude: str) -> Planner:
    return Planner(profile, step_seconds=1.0, fingerprint={}, host_bytes=host, exclude=exclude)


def host_bytes(profile: Profile, planner: Planner) -> int:
    step = on_device(step_of(profile), device_named("a100"))
    found = [
        technique(one.name).edits(step, Option(one.name, where))
        for one in planner.floor_plan(Budget(0)).techniques
        if one.name == "offload_activations"
        for where in one.where
    ]
    return host_peak(edit for edit in found if edit is not None)


def test_a_plan_takes_no_more_of_the_host_than_it_may(profile: Profile) -> None:
    free = planner_of(profile, None, "recompute", "replay")
    wanted = host_bytes(profile, free)
    assert wanted
    for share in (2, 0):
        limited = planner_of(profile, wanted * share // 4, "recompute", "replay")
        assert host_bytes(profile, limited) <= wanted * share // 4
        assert limited.floor.outcome.peak_bytes < free.simulated_original
        where = [one for t in limited.floor_plan(Budget(0)).techniques for one in t.where]
        assert any(" in file" in one for one in where)


def test_a_joint_plan_is_never_slower_than_one_alone(profile: Profile) -> None:
    joint = planner_of(profile, None)
    alone = [
        planner_of(profile, None, "recompute", "replay"),
        planner_of(profile, None, "offload_activations"),
    ]
    for percent in (80, 60):
        budget = joint.simulated_original * percent // 100
        seconds = joint.plan(Budget(budget)).predicted.step_seconds
        for one in alone:
            if one.floor.outcome.peak_bytes <= budget:
                assert seconds <= one.plan(Budget(budget)).predicted.step_seconds + 1e-12
