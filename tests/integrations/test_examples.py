"""The examples of trainers with the libraries themselves: planned, and trained the same as without."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"
INSTALLED = Path(sys.prefix) / "trainers"
"""Where `make test-all` installs tests/integrations/requirements.txt. Inside the prefix: elsewhere `datasets`
would pickle whole modules."""
LIBRARIES = {
    "accelerate_loop": "accelerate",
    "lightning_trainer": "lightning",
    "transformers_trainer": "transformers",
    "trl_dpo": "trl",
    "trl_sft": "trl",
}
pytestmark = pytest.mark.slow


def run(name: str, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    paths = [str(INSTALLED), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *args],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )


@functools.cache
def is_installed(name: str) -> bool:
    return (INSTALLED / name).is_dir() or importlib.util.find_spec(name) is not None


def test_every_example_is_named() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*LIBRARIES}


@pytest.mark.parametrize("name", LIBRARIES)
def test_an_example_is_planned_and_trains_the_same(name: str, tmp_path: Path) -> None:
    if not is_installed(LIBRARIES[name]):
        pytest.skip(f"{LIBRARIES[name]} is not installed: make test-all installs it")
    planned, plain = run(name, tmp_path), run(name, tmp_path, "--plain")
    assert "identical bit for bit. The plan is applied." in planned.stderr
    assert planned.stdout.splitlines()[-1] == plain.stdout.splitlines()[-1]
    assert planned.stdout.splitlines()[-1].startswith("weights ")
    assert (tmp_path / "torchtrim-out" / name / "report.html").is_file()
