"""The formats of `--format`."""

from __future__ import annotations

import importlib
import json
import shlex
import sys
from pathlib import Path

import click
import msgspec
import pytest
from msgspec.structs import replace

from report import samples
from torchtrim.api import Result
from torchtrim.cli.main import main
from torchtrim.cli.output import called_by, command_for, formats, remember_call, show
from torchtrim.records.commands import command, fitting, plan_again, remember
from torchtrim.records.plan import Plan, Prediction, Technique

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


GIVEN = {
    **{"module": False, "script": "train.py", "args": ("--x", "1"), "memory": "60%"},
    **{"device": "cpu", "processes": 2, "steps": 5, "warmup": 1, "timeout": 1200.0, "streams": ""},
    **{"memory_kind": "reserved", "host_memory": "1GiB", "allow": "rounding", "out": Path("o")},
}


def test_a_finding_repeats_the_budget() -> None:
    assert "--memory 60%" in fitting(script="train.py")
    remember(called_by({**GIVEN, "memory": "8GiB"}))
    try:
        assert "optimize train.py --memory 8GiB" in fitting(script="train.py")
    finally:
        remember(None)


@pytest.mark.parametrize("verb", ["run", "optimize", "plan", "verify", "diagnose", "estimate"])
def test_a_suggested_command_repeats_what_its_verb_takes_and_can_be_typed(verb: str) -> None:
    more = {"run": ("--plan", "plan.toml"), "plan": ("--memory", "9GiB")}.get(verb, ())
    words = shlex.split(command_for(GIVEN, verb, *more))
    typed = importlib.import_module(f"torchtrim.cli.verbs.{verb}").command
    at = words.index(verb)
    parsed = typed.make_context(verb, words[at + 1 :]).params
    assert (parsed["script"], tuple(parsed["args"])) == ("train.py", ("--x", "1"))
    names = {one.name for one in typed.params} & set(GIVEN) - {"allow", "memory"}
    assert {name: parsed[name] for name in names} == {name: GIVEN[name] for name in names} | (
        {"memory_kind": "allocated"} if verb == "estimate" else {}
    )
    assert parsed.get("allow") == ("rounding" if verb in ("optimize", "plan") else None)


def test_a_suggested_command_has_the_options_that_its_verb_takes() -> None:
    options = {"module": False, "script": "train.py", "device": "cpu", "args": ("--x", "1")}
    planned = command_for(options, "run", "--plan", "plan.toml")
    assert planned.endswith("run train.py --plan plan.toml -- --x 1")
    assert command_for(options, "plan").endswith("plan train.py --device cpu -- --x 1")
    module = {**options, "module": True, "script": "pkg.train"}
    assert command_for(module, "run").endswith("run -m pkg.train -- --x 1")


def test_rooms_below_suggest_commands_on_the_script_of_the_running_verb() -> None:
    alone = command("plan", script="-x.py", args=("a b",))
    assert alone == "torchtrim plan ./-x.py -- 'a b'"
    with click.Context(click.Command("optimize")):
        remember_call({**GIVEN, "args": ("--lr", "1")})
        assert " plan train.py --steps 5 --processes 2 " in command("plan", script="other.py")
        assert command("plan", script="other.py").endswith(" -- --lr 1")
    assert command("plan", script="-x.py", args=("a b",)) == alone


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "optimize s.py --memory 7"),
        ({"device": "cpu"}, "optimize s.py --memory 7 --device cpu"),
        ({"device": "cuda:0"}, "optimize s.py --memory 7 --device cuda"),
        ({"device": "emulated a100"}, "optimize s.py --memory 7 --device a100"),
        ({"kind": "BITWISE"}, "optimize s.py --memory 7"),
        ({"kind": "ROUNDING"}, "optimize s.py --memory 7 --allow rounding"),
        ({"kind": "SEMANTIC"}, "optimize s.py --memory 7 --allow semantic=precision"),
    ],
)
def test_planning_again_has_the_terms_of_the_plan(changes: dict[str, str], words: str) -> None:
    kind = changes.get("kind")
    one = Technique(name="precision", where=("Net",), equivalence=kind or "BITWISE")  # type: ignore[arg-type]
    device = changes.get("device", "")
    plan = Plan(
        torchtrim="0",
        script="s.py",
        fingerprint={},
        budget_bytes=7,
        techniques=(one,) if kind else (),
        predicted=Prediction(peak_bytes=7, step_seconds=0.1, device=device),
    )
    assert plan_again(plan) == f"torchtrim {words}"
    assert "--memory 60%" in plan_again(replace(plan, asked="60%"))
    assert plan_again(plan, device="cuda:0").endswith("--device cuda")
    offloaded = replace(plan, predicted=replace(plan.predicted, host_bytes=7))
    assert plan_again(offloaded, device="cpu").endswith("--host-memory 7 --device cpu")
    assert "--host-memory" not in plan_again(offloaded)
    assert plan_again(plan, "t.py", ("-a",)) == f"torchtrim {words.replace('s.py', 't.py')} -- -a"
