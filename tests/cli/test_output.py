"""The formats of `--format`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest

from report import samples
from torchtrim.api import Result
from torchtrim.cli.main import main
from torchtrim.cli.output import command_for, formats, show

REPORT = msgspec.structs.replace(samples.DIAGNOSE, project="/home/ana/segmenter")
BEGINS = {
    "text": "5 findings",
    "json": '{\n  "schema_version": 2',
    "sarif": '{\n  "$schema"',
    "github": "::warning file=models/encoder.py,line=43",
    "markdown": "## torchtrim: 5 findings",
}


def shown(form: str, capfd: pytest.CaptureFixture[str]) -> str:
    show(Result(REPORT), form=form, next_command=None)
    return capfd.readouterr().out


@pytest.mark.parametrize("form", ["text", *formats()])
def test_each_format(
    form: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    assert shown(form, capfd).startswith(BEGINS[form])


@pytest.mark.parametrize("form", ["github", "sarif", "markdown"])
def test_on_github_paths_are_relative_to_the_checkout(
    form: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_WORKSPACE", "/home/ana")
    assert "segmenter/train.py" in shown(form, capfd)
    monkeypatch.setenv("GITHUB_WORKSPACE", "/home/elsewhere")
    assert "segmenter/train.py" not in shown(form, capfd)


def test_sarif_knows_findings_by_the_text_of_their_lines(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fingerprint(code: str, line: int) -> str:
        (tmp_path / "a.py").write_text(code)
        found = samples.finding("TT101", line, "waits", path=str(tmp_path / "a.py"))
        report = msgspec.structs.replace(REPORT, project=str(tmp_path), findings=(found,))
        show(Result(report), form="sarif", next_command=None)
        (result,) = json.loads(capfd.readouterr().out)["runs"][0]["results"]
        return str(result["partialFingerprints"])

    assert fingerprint("x.item()\n", 1) == fingerprint("import math\nx.item()\n", 2)
    assert fingerprint("x.item()\n", 1) != fingerprint("y.item()\n", 1)


@pytest.mark.parametrize("verb", ["diagnose", "plan", "optimize", "verify"])
def test_json_and_another_format_contradict(
    verb: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["torchtrim", verb, "none.py", "--format", "sarif", "--json"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "--json is short for --format json" in capfd.readouterr().err


def test_the_next_command_has_the_options_that_its_verb_takes() -> None:
    options = {"module": False, "script": "train.py", "device": "cpu", "args": ("--x", "1")}
    planned = command_for(options, "run", "--plan", "plan.toml")
    assert planned.endswith("run train.py --plan plan.toml -- --x 1")
    assert command_for(options, "plan").endswith("plan train.py --device cpu -- --x 1")
