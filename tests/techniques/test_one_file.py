"""A technique is one file: dropped in, it is planned, applied, drawn, explained and reverted."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from torch import nn

import torchtrim
from steps import train_step
from torchtrim import techniques
from torchtrim.cli.main import torchtrim as command_line
from torchtrim.executor.registry import names
from torchtrim.records.trial import Request
from torchtrim.report import html, terminal
from torchtrim.workflows.optimize.report import optimize_report


class Swish(nn.Module):
    """What the technique knows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x) * x


@pytest.fixture
def dropped_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The technique's file, in a folder where techniques are looked for."""
    shutil.copy(Path(__file__).with_name("swish_again.py"), tmp_path)
    monkeypatch.setattr(techniques, "__path__", [*techniques.__path__, str(tmp_path)])
    yield
    sys.modules.pop("torchtrim.techniques.swish_again", None)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    inner = [m for _ in range(6) for m in (nn.Linear(64, 64), Swish())]
    return nn.Sequential(*inner, nn.Linear(64, 1))


@pytest.mark.usefixtures("dropped_in", "without_replay")
def test_it_is_planned_applied_drawn_explained_and_reverted() -> None:
    assert "swish_again" in names()
    net = model()
    step = train_step(net, torch.randn(4096, 64), "SGD")
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with torchtrim.fit(step, "87%", steps=2) as fitted:
        assert [one.name for one in fitted.plan.techniques] == ["swish_again"]
        assert fitted.certificate is not None
        assert fitted.certificate.verdict == "BITWISE"
        assert fitted.planned is not None
        predicted = fitted.plan.predicted.peak_bytes
        assert fitted.planned.peak_bytes == pytest.approx(predicted, rel=1e-3)
        planned = [part for part in net if isinstance(part, Swish) and type(part) is not Swish]
        assert len(planned) == len(fitted.plan.techniques[0].where)
    assert all(type(part) is Swish for part in net[1::2])
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


@pytest.mark.usefixtures("dropped_in", "without_replay")
def test_it_is_drawn_and_explained() -> None:
    step = train_step(model(), torch.randn(4096, 64), "SGD")
    result = optimize_report(step, "87%", Request(steps=1))
    assert "swish_again" in html.render(result.report, result.before, result.after)
    console = Console(record=True, width=100, file=io.StringIO())
    terminal.render(result.report, console, next_command=None)
    assert "swish_again" in console.export_text()
    explained = CliRunner().invoke(command_line, ["explain", "swish_again"])
    assert explained.exit_code == 0
    assert "takes the sigmoid again in backward" in explained.output


@pytest.mark.slow
def test_a_folder_of_ones_own_is_named_by_the_environment(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("swish_again.py"), tmp_path)
    environment = {**os.environ, "TORCHTRIM_TECHNIQUES": str(tmp_path)}
    words = [sys.executable, "-m", "torchtrim", "explain", "swish_again"]
    said = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    assert "takes the sigmoid again in backward" in said.stdout


def test_what_is_not_there_is_not_known() -> None:
    assert "swish_again" not in names()
