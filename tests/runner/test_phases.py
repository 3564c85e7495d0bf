"""What is learnt of a script's loader while its steps run."""

from __future__ import annotations

from pathlib import Path

from torchtrim.records.trial import Request
from torchtrim.runner.script import Script
from torchtrim.runner.trials import run_trial

SCRIPT = Path(__file__).parents[1] / "scripts" / "slow_loader.py"


def test_samples_that_a_module_changes_are_read_apart_from_their_loader(tmp_path: Path) -> None:
    """As torchvision's transforms do: the module runs in this process then, and is none of the script's."""
    script = Script(str(SCRIPT), ("--module",), device="cpu")
    trial = run_trial(script, Request(times=1), tmp_path)
    assert trial.loader is not None
    assert trial.loader.settings.workers == 1
    assert trial.loader.ready_seconds is not None
    assert trial.loader.ready_seconds < trial.loader.step_seconds
    assert trial.loader.parts is not None
    assert trial.loader.parts.reading >= 8 * 0.015
    assert trial.profile is not None
    assert trial.profile.loader == trial.loader
    assert {one.path for one in trial.profile.modules} == {"Linear"}
