"""`torchtrim lint`, as a person types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from torchtrim.cli.main import main

WAITS = """import torch


def f(x: torch.Tensor, m: torch.Tensor):
    x[m.nonzero(as_tuple=True)] = 0
    return x.sum().item()
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(WAITS)
    (tmp_path / "clean.py").write_text("import torch\n")

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["torchtrim", "lint", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return run


def test_findings_exit_1_and_none_exits_0(run) -> None:
    code, out, err = run(".", "--format", "concise")
    assert code == 1
    assert [line.split(" ")[:2] for line in out.splitlines()] == [
        ["model.py:5:", "TT102"],
        ["model.py:6:", "TT101"],
    ]
    assert err.startswith("2 findings, ")
    assert run("clean.py") == (0, "", "no findings\n")
    assert run(".", "--select", "TT103")[0] == 0


def test_the_full_form_shows_source_and_fix(run) -> None:
    _, out, _ = run("model.py")
    assert "     5 >     x[m.nonzero(as_tuple=True)] = 0" in out
    assert "+    x[m != 0] = 0" in out


def test_a_diff_changes_nothing_and_can_be_applied(run, tmp_path: Path) -> None:
    code, out, err = run(".", "--diff", "--unsafe-fixes", "--select", "TT102")
    assert code == 1
    assert (tmp_path / "model.py").read_text() == WAITS
    assert "1 would be fixed" in err
    subprocess.run(["git", "apply", "-"], input=out.encode(), cwd=tmp_path, check=True)
    assert "x[m != 0] = 0" in (tmp_path / "model.py").read_text()


def test_fixing_writes_and_reports_what_is_left(run, tmp_path: Path) -> None:
    code, out, err = run(".", "--unsafe-fixes", "--select", "TT102", "--format", "concise")
    assert (code, out) == (0, "")
    summary, written = err.splitlines()
    assert summary == "no findings, 1 fixed"
    assert written.startswith("source written: model.py. Undo: ")
    assert written.endswith("undo model.py")
    assert "x[m != 0] = 0" in (tmp_path / "model.py").read_text()
    assert run(".", "--fix", "--select", "TT102")[0] == 0


def test_a_link_beside_its_target_says_what_was_written(run, tmp_path: Path) -> None:
    (tmp_path / "link.py").symlink_to("model.py")
    (tmp_path / "folder").symlink_to(".")
    code, _, err = run("--unsafe-fixes", "link.py", ".", "folder", "model.py")
    assert code == 1
    assert "1 fixed" in err
    assert "source written: model.py. Undo:" in err
    assert "error" not in err
    assert "x[m != 0] = 0" in (tmp_path / "model.py").read_text()
    assert (tmp_path / "link.py").is_symlink()


def test_what_is_no_python_is_told_and_the_rest_is_linted(run, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import torch\ndef f(:\n")
    code, out, err = run(".", "--format", "concise")
    assert code == 2
    assert len(out.splitlines()) == 2
    assert "broken.py, line 2 is not valid Python" in err


@pytest.mark.parametrize(
    "words", [["gone"], [".", "--select", "E5"], [".", "--format", "text"], []]
)
def test_wrong_usage_exits_2(run, words: list[str]) -> None:
    assert run(*words)[0] == 2


def test_for_machines(run) -> None:
    report = json.loads(run(".", "--format", "json")[1])
    assert [found["path"] for found in report["findings"]] == ["model.py", "model.py"]
    assert report["verb"] == "lint"
    results = json.loads(run(".", "--format", "sarif")[1])["runs"][0]["results"]
    place = results[0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "model.py"
    assert place["region"]["startLine"] == 5
    assert run(".", "--format", "github")[1].startswith("::warning file=model.py,line=5,")


def test_torch_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(WAITS)
    code = (
        "import sys; from torchtrim.cli.main import torchtrim\n"
        f"torchtrim.main(['lint', {str(tmp_path)!r}], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
