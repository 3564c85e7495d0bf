"""The battery of `doctor --gpu`, with an emulated device in place of the real one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from torchtrim import UsageError
from torchtrim.cli.main import torchtrim
from torchtrim.emulator import emulate
from torchtrim.workflows import battery as own


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An emulated device that the battery takes for a real one, and for its model."""

    @contextlib.contextmanager
    def same(_: object) -> Iterator[Any]:
        yield emulation

    with emulate() as emulation:
        monkeypatch.setattr(own, "emulate", same)
        monkeypatch.setattr(
            own, "_programs", lambda: {"one": own._stepping(torch.nn.Linear(8, 8), 4, 8)}
        )
        yield


def test_what_is_equal_holds_and_what_fails_fails_alone(device: None) -> None:
    report = own.battery()
    found = {check.name: check for check in report.checks}
    assert list(found) == [
        *("operators", "bytes", "plans", "offload", "workspaces", "allocator", "syncs")
    ]
    assert found["operators"].holds
    assert found["allocator"].error  # An emulated device has no recording of its allocator.
    assert not report.holds
    lines = own.battery_lines(report)
    assert len(lines) == 8
    assert "FAILED" in lines[6]


def test_an_operator_that_only_one_of_them_runs(
    device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = own._both

    def differs(program: Any, model: Any) -> Any:
        real, modelled, beside = both(program, model)
        real.operators[:] = real.operators[:-3]
        return real, modelled, beside

    monkeypatch.setattr(own, "_both", differs)
    check = own._operators(own._model_here())
    assert not check.holds
    assert check.details["one"]["only modelled"]


def test_without_a_gpu(tmp_path: Path) -> None:
    words = ["doctor", "--gpu", str(tmp_path / "gpu.json")]
    result = CliRunner().invoke(torchtrim, words, standalone_mode=False)
    assert isinstance(result.exception, UsageError)
    assert "no GPU here" in str(result.exception)
    assert not list(tmp_path.iterdir())
