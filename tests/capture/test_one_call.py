from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from torchtrim.capture.one_call import record_call
from torchtrim.emulator import current, emulate
from torchtrim.records.profile import check


def add() -> torch.Tensor:
    return torch.ones(3, device="cuda") + 1


def test_one_call_is_recorded() -> None:
    profile = record_call(add, device="emulated")
    assert [op.name for op in profile.operators] == ["aten::ones.default", "aten::add.Tensor"]
    assert profile.device == "emulated"
    assert check(profile) is None


def test_without_a_gpu_it_is_emulated_by_itself() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert record_call(add).device == "emulated"
    assert current() is None


def test_an_emulation_that_runs_is_used() -> None:
    with emulate() as emulation:
        record_call(add)
        assert current() is emulation
        assert torch.ones(1, device="cuda").is_cuda


def test_calls_before_are_not_recorded() -> None:
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        torch.ones(len(calls), device="cuda")

    profile = record_call(call, warmup=2, device="emulated")
    assert len(calls) == 3
    assert [op.outputs[0].shape for op in profile.operators] == [(3,)]


def test_modules_of_the_call_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    profile = record_call(lambda: model(torch.ones(1, 2)), device="cpu")
    assert any(storage.kind == "parameter" for storage in profile.storages)
    assert {module.type for module in profile.modules} >= {"Sequential", "Linear", "ReLU"}


def test_lines_of_the_project_are_the_users() -> None:
    inside = record_call(add, device="emulated", project=Path(__file__).parent)
    assert inside.places[inside.operators[0].place].path == __file__


def test_a_call_that_fails_leaves_nothing_behind() -> None:
    def fail() -> None:
        torch.ones(1, device="cuda")
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            record_call(fail, device="emulated")
        assert current() is None
    assert record_call(add, device="emulated").operators


def test_on_the_cpu_nothing_waits() -> None:
    profile = record_call(lambda: torch.ones(3).sum().item(), device="cpu")
    assert not profile.syncs
    assert profile.operators
