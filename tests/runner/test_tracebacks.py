"""A planned script that fails, or is interrupted, shows its own frames and torch's, none of torchtrim's."""

from __future__ import annotations

import traceback
from typing import Any

import pytest

from torchtrim.core.words import did_you_mean
from torchtrim.runner import planned_script

SCRIPT = """
def train():
    try:
        did_you_mean("tran", ["train"], shown=step)
    except RuntimeError as error:
        raise KeyboardInterrupt from error

def step(name):
    raise RuntimeError(name)

def main(name):
    train()
"""


def shown(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr("sys.excepthook", traceback.print_exception)
    names: dict[str, Any] = {"did_you_mean": did_you_mean}
    exec(compile(SCRIPT, "train.py", "exec"), names)
    with pytest.raises(KeyboardInterrupt) as stopped:
        did_you_mean("tran", ["train"], shown=names["main"])
    planned_script._show(stopped.value)
    return capfd.readouterr().err


def test_torchtrims_frames_are_left_out_of_the_error_and_of_its_cause(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHTRIM_DEBUG", raising=False)
    err = shown(monkeypatch, capfd)
    assert "src/torchtrim" not in err
    lines = [line.split()[-1] for line in err.splitlines() if '"train.py"' in line]
    assert lines == ["train", "step", "main", "train"]
    assert err.rstrip().endswith("KeyboardInterrupt")


def test_debugging_shows_them(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHTRIM_DEBUG", "1")
    assert "did_you_mean" in shown(monkeypatch, capfd)
