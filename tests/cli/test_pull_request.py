"""The workflow of the example certifies a pull request against its base: its own steps, in a repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "pull-request"
SOUND = ("nn.Linear(64, 8))", "nn.Linear(64, 8)).train()")
WRONG = ("optimizer.zero_grad()", "optimizer.zero_grad() if _ % 2 else None")


def steps() -> dict[str, str]:
    """Return the commands of the workflow's steps, by name."""
    text = (EXAMPLE / ".github" / "workflows" / "certify.yml").read_text()
    return dict(re.findall(r"- name: (\w+)\n +run: (.+)", text))


def sh(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as a runner would."""
    env = {
        **os.environ,
        "GITHUB_BASE_REF": "main",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    return subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


def pull_request(folder: Path, change: tuple[str, str]) -> Path:
    """Return the checkout of a pull request that makes a change."""
    base, checkout = folder / "origin", folder / "checkout"
    shutil.copytree(EXAMPLE, base)
    user = "-c user.name=a -c user.email=a@b"
    assert sh(f"git init -qb main && git add . && git {user} commit -qm base", base).returncode == 0
    assert sh(f"git clone -q {base} {checkout}", folder).returncode == 0
    script = checkout / "train.py"
    text = script.read_text()
    assert change[0] in text
    script.write_text(text.replace(*change))
    assert sh(f"git checkout -qb change && git {user} commit -qam change", checkout).returncode == 0
    return checkout


@pytest.mark.slow
@pytest.mark.parametrize(("change", "code"), [(SOUND, 0), (WRONG, 1)])
def test_a_pull_request_is_certified(tmp_path: Path, change: tuple[str, str], code: int) -> None:
    checkout = pull_request(tmp_path, change)
    assert [*steps()] == ["Install", "Base", "Certify"]
    assert sh(steps()["Base"], checkout).returncode == 0
    found = sh(steps()["Certify"], checkout)
    assert found.returncode == code, found.stderr
    assert ("::error" in found.stdout) == bool(code), found.stdout
