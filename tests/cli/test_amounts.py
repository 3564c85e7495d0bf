"""An amount of memory that cannot be read ends a verb before anything runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchtrim
from steps import train_step
from torchtrim import api
from torchtrim.cli.main import main
from torchtrim.errors import UsageError
from torchtrim.records.trial import Request
from torchtrim.runner.script import Script
from torchtrim.workflows.estimate import spread_over
from torchtrim.workflows.optimize.report import optimize_report

RAN = "import pathlib\npathlib.Path('ran').touch()\n"
COMMANDS = [
    ("optimize", "train.py", "--memory", "{}"),
    ("optimize", "train.py", "--mode", "inference", "--memory", "{}"),
    ("optimize", "train.py", "--fix", "--memory", "{}"),
    ("optimize", "train.py", "--memory", "60%", "--host-memory", "{}"),
    ("plan", "train.py", "--memory", "{}"),
    ("plan", "train.py", "--export", "python", "--memory", "{}"),
    ("plan", "train.py", "--find-batch", "--memory", "{}"),
    ("plan", "train.py", "--stages", "2", "--memory", "{}"),
    ("plan", "train.py", "--memory", "60%", "--host-memory", "{}"),
    ("estimate", "train.py", "--fits", "{}"),
    ("estimate", "train.py", "--max-batch", "{}"),
    ("diagnose", "train.py", "--max-peak", "{}"),
    ("diagnose", "train.py", "--fail-on", "{}"),
    ("tune-loader", "train.py", "--host-memory", "{}"),
    ("stream-check", "train.py", "--max-growth", "{}"),
    ("pack", "buffers.csv", "--capacity", "{}"),
    ("compare", "a.json", "b.json", "--fail-on", "{}"),
]
NO_SHARE = ("--host-memory", "--fits", "--max-peak", "--max-growth", "--capacity")
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(RAN)
    Path("pyproject.toml").write_text("")
    monkeypatch.setattr("torchtrim.runner.warm.warm_up", lambda *_: Path("ran").touch())
    monkeypatch.setattr("torchtrim.runner.trials._run_script", lambda *_: Path("ran").touch())

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["torchtrim", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(str(ended.value.code)), capfd.readouterr().err

    return run


def refused(run: Run, *words: str) -> str:
    """The message of a verb that ends at once."""
    code, said = run(*words)
    assert code == 2
    assert not Path("ran").exists()
    return said


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("wrong", ["8GIG", "-1GiB", "inf"])
def test_a_wrong_amount_costs_nothing(words: tuple[str, ...], wrong: str, run: Run) -> None:
    said = refused(run, *(word.format(wrong) for word in words))
    assert f"cannot read '{wrong}' as an amount of memory" in said
    assert "8GiB" in said


@pytest.mark.parametrize("words", [w for w in COMMANDS if w[-2] in NO_SHARE], ids=" ".join)
def test_a_share_of_nothing_costs_nothing(words: tuple[str, ...], run: Run) -> None:
    assert "is a percentage" in refused(run, *(word.format("60%") for word in words))


@pytest.mark.parametrize("verb", ["optimize", "plan"])
def test_one_of_the_project_is_named_as_such(verb: str, run: Run) -> None:
    Path("pyproject.toml").write_text('[tool.torchtrim]\nmemory = "8GIG"\n')
    said = refused(run, verb, "train.py")
    assert "memory under [tool.torchtrim] of pyproject.toml: cannot read '8GIG'" in said


@pytest.mark.parametrize("wrong", ["8GIG", 0.6, -1])
@pytest.mark.parametrize(
    "call",
    [
        lambda work, wrong: torchtrim.fit(work, wrong),
        lambda work, wrong: torchtrim.plan(work, wrong),
        lambda work, wrong: api.find_batch(work, wrong),
        lambda work, wrong: optimize_report(work, wrong, Request()),
        lambda work, wrong: spread_over(work, 2, memory=wrong, batch=4),
        lambda work, wrong: torchtrim.optimize_memory(
            work.model, torch.ones(2, 4), "training", memory=wrong
        ),
        lambda _, wrong: api.plan_pipeline(Script("train.py"), wrong, Request(), stages=2),
        lambda _, wrong: api.optimize_calls_report(Script("train.py"), wrong, Request()),
        lambda _, wrong: api.estimate_report(Script("train.py"), Request(), max_batch=wrong),
    ],
)
def test_so_it_is_in_python(
    call: Callable[[Any, Any], object], wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs(*_: object) -> None:
        raise AssertionError("it ran")

    model = nn.Linear(4, 4)
    model.register_forward_pre_hook(runs)
    monkeypatch.setattr("torchtrim.runner.trials._run_script", runs)
    with pytest.raises(UsageError, match="amount of memory"):
        call(train_step(model, torch.ones(2, 4), "SGD"), wrong)
