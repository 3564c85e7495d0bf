"""The gate from the command line: a script that waits, its allow-list, its repair."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from torchtrim.cli.main import main

WAITS = """import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def step():
    loss = model(torch.ones(4, 8)).sum()
    loss.backward()
    optimizer.step()
    print(loss.item())
for _ in range(9):
    step()
"""


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    (tmp_path / "pyproject.toml").write_text("")

    def gate(*words: str) -> tuple[int, str, str]:
        common = ("diagnose", "waits.py", "--device", "emulated", "--steps", "1")
        monkeypatch.setattr(sys, "argv", ["torchtrim", *common, "--max-syncs", "0", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return int(str(ended.value.code)), out, err

    return gate


def test_over_then_accepted_then_moved_then_repaired(gate, tmp_path: Path) -> None:
    script, allow = tmp_path / "waits.py", tmp_path / "torchtrim-allow.toml"
    script.write_text(WAITS)
    code, out, _ = gate()
    assert code == 1
    assert out.startswith("OVER THE LIMIT  1 wait a step, --max-syncs 0\n  TT101  waits.py:8  1 a")
    assert "--max-syncs 0 --update-allow" in " ".join(out.replace("\\\n", "").split())
    code, out, _ = gate("--update-allow")
    assert code == 0
    assert 'function = "step"\nline_text = "print(loss.item())"\ncount = 1' in allow.read_text()
    allow.write_text(allow.read_text() + 'reason = "progress"\n')
    script.write_text("import math\n\n" + WAITS)
    code, out, err = gate("--format", "github")
    assert (code, err) == (0, "allowed by torchtrim-allow.toml: 1 a step at 1 place\n")
    assert "::notice file=waits.py,line=10,endLine=10,title=TT101" in out
    script.write_text(WAITS.replace("    print(loss.item())\n", ""))
    code, out, err = gate("--json", "--update-allow")
    assert code == 0
    assert "no longer needed" in err
    assert json.loads(out)["allowed"][0]["used"] == 0
    assert 'reason = "progress"' in allow.read_text()


def test_a_list_that_cannot_be_read_costs_no_run(gate, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("raise SystemExit('was run')")
    (tmp_path / "bad.toml").write_text("[[allow]]\ncode = 1\n")
    code, out, err = gate("--allow", "bad.toml")
    assert (code, out) == (2, "")
    assert "allow[0].code" in err
