"""Mistakes of a first day: each is answered before anything runs, with what was meant."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner

from torchtrim.cli.main import main, torchtrim
from torchtrim.cli.script_options import check_passed
from torchtrim.cli.verbs.run import command as run
from torchtrim.core.glossary import GLOSSARY, meaning
from torchtrim.errors import ApplyFailed, UsageError
from torchtrim.executor.apply import digest_of, is_unchanged, sha256_of
from torchtrim.records.budget import MemoryKind
from torchtrim.records.finding import EQUIVALENCES
from torchtrim.records.plan import Status
from torchtrim.records.report import Report
from torchtrim.report.sections import sentences


def refused(*words: str) -> str:
    ended = CliRunner().invoke(torchtrim, words)
    assert isinstance(ended.exception, UsageError), ended.output
    return str(ended.exception)


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("raise SystemExit('it ran')\n")


def test_an_error_is_shown_though_the_script_has_put_another_stderr_in_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def verb(**_: object) -> None:
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        raise ApplyFailed("the plan was made for another model")

    monkeypatch.setattr(torchtrim, "main", verb)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == ApplyFailed("").exit_code
    assert capsys.readouterr().err == "error: the plan was made for another model\n"


@pytest.mark.parametrize("verb", ["optimize", "plan"])
@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("60", "60% of the original's peak, or 60GiB"),
        ("0.6", "60% of the original's peak, or 0.6GiB"),
        ("500", "500MiB, or 500GiB"),
    ],
)
def test_a_bare_small_number_is_no_budget(verb: str, text: str, meant: str) -> None:
    said = refused(verb, "train.py", "--memory", text)
    assert said.startswith(f"--memory: {text} is {int(float(text))} bytes")
    assert said.endswith(f"Did you mean {meant}?")


def test_a_plan_in_place_of_a_script_is_named() -> None:
    said = refused("verify", "train.py", "plan.toml", "--", "--lr", "1")
    assert said.endswith(" verify train.py --plan plan.toml -- --lr 1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "train.py", "--device", "cpu"), "run train.py -- --device cpu"),
        (
            ("run", "--device", "cpu", "train.py", "--plan", "p"),
            "run --plan p train.py -- --device cpu",
        ),
        (("run", "train.py", "--steps=4", "data"), "run train.py -- --steps=4 data"),
        (("optimize", "train.py", "--epochs", "1", "-v"), "optimize -v train.py -- --epochs 1"),
        (
            ("diagnose", "train.py", "--lr=1", "--warmup", "2"),
            "diagnose --warmup 2 train.py -- --lr=1",
        ),
        (
            ("optimize", "-m", "pkg.train", "--lr", "1", "--memory", "60%", "--", "a.json"),
            "optimize --memory 60% -m pkg.train -- --lr 1 a.json",
        ),
    ],
)
def test_an_option_that_is_not_torchtrims_is_said_to_follow_two_dashes(
    words: tuple[str, ...], said: str
) -> None:
    assert refused(*words).endswith(f" {said}")


def test_a_misspelt_option_is_named() -> None:
    assert "optimize has no option --memry. Did you mean --memory?" in refused(
        "optimize", "train.py", "--memry", "60%"
    )


def test_an_option_of_the_script_is_passed_and_one_of_both_is_asked_about() -> None:
    Path("takes.py").write_text("parser.add_argument('--device'); parser.add_argument('--verbose')")
    check_passed(run, "run", ["takes.py", "--device", "cpu", "--epochs", "1"])
    check_passed(run, "run", ["--verbose", "takes.py", "--plan", "plan.toml"])
    check_passed(run, "run", ["train.py", "--", "--device", "cpu"])
    said = refused("run", "takes.py", "--verbose")
    assert said.startswith(
        "both run and takes.py have --verbose. Put torchtrim's before the script"
    )


def test_a_function_is_no_step() -> None:
    import torchtrim as package

    with pytest.raises(UsageError, match=r"fit expects a torchtrim\.TrainStep, not function"):
        package.fit(lambda: None, "60%")  # type: ignore[arg-type]


def test_a_misspelt_script_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Did you mean train.py?" in refused("optimize", "trian.py", "--memory", "60%")
    assert "Did you mean" not in refused("optimize", "zzz.py", "--memory", "60%")


def test_a_misspelt_verb_is_named() -> None:
    said = refused("optimise", "train.py")
    assert "there is no command 'optimise'. Did you mean `torchtrim optimize`?" in said
    assert "Did you mean" not in refused("qqqq")


@pytest.mark.parametrize("word", [*GLOSSARY, "syncs", "bitwise", "Saved-Tensors", "as_asked"])
def test_each_word_is_explained(word: str) -> None:
    shown = CliRunner().invoke(torchtrim, ["explain", word])
    assert shown.exit_code == 0
    assert shown.output.startswith((meaning(word) or ("?",))[0])


def test_the_words_of_verdicts_figures_and_labels_are_explained() -> None:
    report = Report(torchtrim="0", torch="2", verb="plan", device="cpu", script="train.py", steps=3)
    labels = {*sentences(report)} - {"note"}
    words = {*EQUIVALENCES, *get_args(Status), *get_args(MemoryKind), *labels}
    words |= {"AS ASKED", "UNDECIDED", "NOT EQUAL", "[?]", "measured", "modelled", "simulated"}
    assert {word for word in words if meaning(word) is None} == set()


def test_an_unknown_word_gets_the_nearest() -> None:
    assert "Did you mean certificate?" in refused("explain", "certificat")
    assert "Did you mean" not in refused("explain", "xyzzy12345")


CODE = "import torch\n\ndef f(x):\n    return x + 1\n"
SAME = {
    "comment": CODE.replace("+ 1", "+ 1  # one"),
    "docstring": CODE.replace("    return", "    '''Add.'''\n    return"),
    "blank lines and quotes": CODE.replace("\n\n", "\n\n\n\n"),
}
OTHER = {"number": CODE.replace("+ 1", "+ 2"), "name": CODE.replace("def f", "def g")}


@pytest.mark.parametrize("name", SAME)
def test_a_plan_survives_what_is_no_code(name: str) -> None:
    script = Path("script.py")
    script.write_text(CODE)
    digest = digest_of(script)
    script.write_text(SAME[name])
    assert is_unchanged(script, digest)


@pytest.mark.parametrize("name", OTHER)
def test_a_plan_does_not_survive_other_code(name: str) -> None:
    script = Path("script.py")
    script.write_text(CODE)
    digest = digest_of(script)
    script.write_text(OTHER[name])
    assert not is_unchanged(script, digest)


def test_digests_of_earlier_versions_and_of_broken_files_are_of_the_bytes() -> None:
    script = Path("script.py")
    script.write_text(CODE)
    assert is_unchanged(script, sha256_of(script))
    script.write_text("def broken(:\n")
    assert digest_of(script) == sha256_of(script)
    assert is_unchanged(script, digest_of(script))


def test_another_script_is_told_the_command_that_plans_again(trained: Callable[[str], str]) -> None:
    said = trained("train.py")
    assert said.startswith("train.py has changed since the plan was made. If you know")
    assert "\nPlan again: torchtrim optimize train.py --memory " in said
    assert "optimize" in said
    assert said.count("train.py") == 2
    other = trained("other.py")
    assert other.startswith("the plan was made for other.py, not for train.py. If you know")


@pytest.fixture
def trained() -> Callable[[str], str]:
    from torchtrim.records.plan import Plan, Prediction
    from torchtrim.runner.planned_script import check_script
    from torchtrim.runner.script import Script

    def said(script: str) -> str:
        plan = Plan(
            torchtrim="0",
            script=script,
            script_sha256="0" * 64,
            fingerprint={},
            budget_bytes=2**20,
            predicted=Prediction(peak_bytes=1, step_seconds=1.0),
        )
        with pytest.raises(ApplyFailed) as raised:
            check_script(plan, Script("train.py"))
        return str(raised.value)

    return said
