"""Limits and the allow-list, on reports that no program made."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from report import samples
from torchtrim.api import Result
from torchtrim.cli.main import main
from torchtrim.cli.verbs.diagnose import WAITS, Gate, GateLimits
from torchtrim.errors import UnreadableInput, UsageError
from torchtrim.records import Report
from torchtrim.records.allow import Entry, load_allow, save_allow

CODE = "import torch\n\n\ndef step():\n    loss = x.item()\n    loss = y.item()\n"


def options(**given: Any) -> dict[str, Any]:
    names = ("fail_on", "max_syncs", "max_peak", "allow")
    return {**dict.fromkeys(names), "update_allow": False, **given}


@pytest.fixture
def result(tmp_path: Path) -> Result:
    path = tmp_path / "train.py"
    path.write_text(CODE)
    wait = samples.finding("TT101", 5, "waits", path=str(path), count_per_step=2)
    dear = samples.finding("TT201", 6, "large", path=str(path), price_bytes=50 * samples.MIB)
    slow = samples.finding("TT301", 0, "slow", path=str(path), price_ms=20.0)
    report = msgspec.structs.replace(
        samples.DIAGNOSE, project=str(tmp_path), script=str(path), findings=(wait, dear, slow)
    )
    return Result(report, samples.profile(64))


def limits_passed(report: Report, **given: Any) -> list[str]:
    return [o.limit for o in GateLimits.of(options(**given)).over(report, report.findings)]


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ({}, []),
        ({"max_syncs": 2}, []),
        ({"max_syncs": 1}, ["2 waits a step, --max-syncs 1"]),
        ({"fail_on": "20 ms"}, ["1 finding, --fail-on 20 ms"]),
        ({"fail_on": "21ms"}, []),
        ({"fail_on": "50MiB"}, ["1 finding, --fail-on 50MiB"]),
        ({"fail_on": "51MiB"}, []),
        ({"max_peak": "412MiB"}, []),
        ({"max_peak": "411MiB"}, ["peak 412 MiB, --max-peak 411 MiB"]),
        (
            {"max_syncs": 0, "max_peak": "1MiB"},
            ["2 waits a step, --max-syncs 0", "peak 412 MiB, --max-peak 1.00 MiB"],
        ),
    ],
)
def test_what_passes_a_limit(result: Result, given: dict[str, Any], passed: list[str]) -> None:
    assert limits_passed(result.report, **given) == passed


@pytest.mark.parametrize("given", [{"fail_on": "dear"}, {"max_peak": "60%"}])
def test_a_limit_that_cannot_be_read(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        GateLimits.of(options(**given))


def test_a_step_that_was_not_measured_is_held_to_nothing(result: Result) -> None:
    with pytest.raises(UsageError, match="not measured"):
        limits_passed(msgspec.structs.replace(result.report, original=None))


def test_a_race_is_no_wait(result: Result) -> None:
    race = msgspec.structs.replace(result.report.findings[0], code="TT105")
    assert (
        limits_passed(msgspec.structs.replace(result.report, findings=(race,)), max_syncs=0) == []
    )
    assert WAITS == ("TT101", "TT102", "TT103", "TT104")


def test_the_list_in_the_project_is_found_and_takes_findings_out(
    result: Result, tmp_path: Path
) -> None:
    allowed = Entry(code="TT101", path="train.py", line_text="loss = x.item()", count=2)
    save_allow([allowed], tmp_path / "torchtrim-allow.toml")
    judged = Gate(options(max_syncs=0), tmp_path).judge(result)
    assert judged.over == ()
    assert [a.used for a in judged.result.report.allowed] == [2]
    assert judged.text == "allowed by torchtrim-allow.toml: 2 a step at 1 place\n"


def test_what_is_over_is_said_and_noted(result: Result, tmp_path: Path) -> None:
    judged = Gate(options(max_syncs=0), tmp_path).judge(result)
    assert judged.acceptable
    assert "  TT101  train.py:5  2 a step\n" in judged.text
    assert judged.result.report.notes[-1] == "over the limit: 2 waits a step, --max-syncs 0"


def test_a_peak_cannot_be_accepted(result: Result, tmp_path: Path) -> None:
    assert not Gate(options(max_peak="1MiB"), tmp_path).judge(result).acceptable


def test_updating_writes_what_the_limits_count(result: Result, tmp_path: Path) -> None:
    judged = Gate(options(max_syncs=0, update_allow=True), tmp_path).judge(result)
    assert judged.over == ()
    (entry,) = load_allow(tmp_path / "torchtrim-allow.toml").allow
    assert (entry.code, entry.function, entry.line_text, entry.count) == (
        "TT101",
        "step",
        "loss = x.item()",
        2,
    )
    dear = tmp_path / "dear.toml"
    Gate(options(fail_on="10ms", allow=dear, update_allow=True), tmp_path).judge(result)
    assert [e.code for e in load_allow(dear).allow] == ["TT301"]
    every = tmp_path / "every.toml"
    Gate(options(allow=every, update_allow=True), tmp_path).judge(result)
    assert [e.code for e in load_allow(every).allow] == ["TT101", "TT201", "TT301"]


def test_an_entry_for_a_file_that_is_gone_is_named_and_one_for_another_script_is_not(
    result: Result, tmp_path: Path
) -> None:
    (tmp_path / "other.py").touch()
    entries = [
        Entry(code="TT101", path=path, line_text="z.item()", count=1)
        for path in ("gone.py", "other.py", "x" * 300, "a\0b")
    ]
    save_allow(entries, tmp_path / "torchtrim-allow.toml")
    judged = Gate(options(), tmp_path).judge(result)
    assert [a.path for a in judged.result.report.allowed if not a.used] == [
        "gone.py",
        "x" * 300,
        "a\0b",
    ]
    assert "  TT101  gone.py  z.item()\n" in judged.text


def test_a_list_that_is_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UnreadableInput, match="cannot read"):
        Gate(options(allow=tmp_path / "none.toml"), tmp_path)
    assert Gate(options(), tmp_path).path == tmp_path / "torchtrim-allow.toml"


WAITING = """import torch
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
    script.write_text(WAITING)
    code, out, _ = gate()
    assert code == 1
    assert out.startswith("OVER THE LIMIT  1 wait a step, --max-syncs 0\n  TT101  waits.py:8  1 a")
    assert "--max-syncs 0 --update-allow" in " ".join(out.replace("\\\n", "").split())
    code, out, _ = gate("--update-allow")
    assert code == 0
    assert 'function = "step"\nline_text = "print(loss.item())"\ncount = 1' in allow.read_text()
    allow.write_text(allow.read_text() + 'reason = "progress"\n')
    script.write_text("import math\n\n" + WAITING)
    code, out, err = gate("--format", "github")
    assert (code, err) == (0, "allowed by torchtrim-allow.toml: 1 a step at 1 place\n")
    assert "::notice file=waits.py,line=10,endLine=10,title=TT101" in out
    script.write_text(WAITING.replace("    print(loss.item())\n", ""))
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
