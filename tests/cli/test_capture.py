"""`diagnose --capture`, as a person types it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from torchtrim.cli.main import main

SCRIPT = Path(__file__).parent.parent / "scripts" / "captured.py"


@pytest.mark.parametrize(
    ("words", "lines"), [((), 1), pytest.param(("--quiet",), 0, marks=pytest.mark.slow)]
)
def test_a_step_on_an_emulated_device(
    words: tuple[str, ...],
    lines: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    common = ("diagnose", str(SCRIPT), "--device", "emulated", "--steps", "1", "--capture")
    monkeypatch.setattr(sys, "argv", ["torchtrim", *common, "--json", "--", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    report = json.loads(capfd.readouterr().out)
    found = [one for one in report["findings"] if one["code"] == "TT402"]
    assert ended.value.code == lines
    assert len(found) == lines
    assert all(one["line"] == 17 for one in found)
    word = "no, 1 line is in the way" if lines else "yes"
    assert report["notes"][0].startswith(f"capturable: {word}")
