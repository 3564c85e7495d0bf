"""A part that fails, fails alone: techniques, rules, fixes and renderers that raise, dropped in."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import profiles
import torchtrim
from steps import train_step
from torchtrim import fixes, rules, techniques
from torchtrim.cli.main import CRASHED, main
from torchtrim.core import isolation as parts
from torchtrim.errors import ApplyFailed, PlannedStepFailed, UsageError
from torchtrim.records.allow import FILE_NAME, Entry, save_allow
from torchtrim.records.files import load_plan, save_profile
from torchtrim.records.plan import Technique
from torchtrim.records.terms import Terms
from torchtrim.records.trial import Request, Trial
from torchtrim.rules.registry import all_rules, diagnose
from torchtrim.workflows.diagnose import diagnose_report
from torchtrim.workflows.optimize.fitting import Fitting
from torchtrim.workflows.optimize.report import optimize_report

SWISH = Path(__file__).parent / "techniques" / "swish_again.py"
RULE = '''"""It fails.

## What it does
"""
from torchtrim.rules.base import Rule
def check(profile):
    {body}
RULE = Rule(code="{code}", name="it-fails", check=check)
'''
FIX = '''"""It fails."""
from torchtrim.rewriter.fix import Fix, of_forms
def write(match, facts):
    raise KeyError("of the fix")
def find(source):
    {find}
FIX: Fix = Fix(codes=("TT101",), equivalence="BITWISE", find={found}, write=write)
'''
READS = "import torch\ndef f(x: torch.Tensor):\n    return x.item()\n"
TRAINS = """import torch
torch.manual_seed(0)
blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(3)]
model = torch.nn.Sequential(*blocks).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(12):
    optimizer.zero_grad()
    loss = model(torch.randn(512, 64).cuda()).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""
Drop = Callable[[ModuleType, str, str], None]


@pytest.fixture(autouse=True)
def survives(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a user runs it."""
    monkeypatch.delenv(parts.DEBUG)
    parts.forget()
    yield
    parts.forget()


@pytest.fixture
def drop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drop]:
    """Puts a file with that text where parts of a package are looked for."""
    dropped = []

    def drop(package: ModuleType, name: str, text: str) -> None:
        folder = tmp_path / package.__name__
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(text)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        monkeypatch.setenv("TORCHTRIM_TECHNIQUES", str(tmp_path / techniques.__name__))
        dropped.append(f"{package.__name__}.{name}")

    yield drop
    for name in dropped:
        sys.modules.pop(name, None)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("")

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["torchtrim", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(str(ended.value.code)), *capfd.readouterr()

    return run


@pytest.fixture
def break_rule(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the rule of that code fail."""

    def broken(code: str) -> None:
        every = [
            replace(one, check=lambda _: [][0]) if one.code == code else one for one in all_rules()
        ]
        monkeypatch.setattr("torchtrim.rules.registry.all_rules", lambda: every)

    return broken


@pytest.fixture(scope="module")
def watched() -> Trial:
    return Fitting(step(), Request(steps=1), lambda _: None).observe()


@pytest.fixture
def trial(watched: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script is not run: what was seen of a step stands for it."""
    monkeypatch.setattr("torchtrim.workflows.diagnose._observed", lambda *_: watched)


def told(said: str, part: str) -> None:
    """The part is named in one line, with what to do."""
    (line,) = [one for one in said.splitlines() if f"{part} failed and was left out" in one]
    assert line.startswith("error: ")
    assert "bug in torchtrim" in line
    assert "TORCHTRIM_DEBUG=1" in line
    assert "Traceback" not in said


def step() -> Any:
    torch.manual_seed(0)
    inner = [m for _ in range(4) for m in (nn.Linear(64, 64), Swish())]
    return train_step(nn.Sequential(*inner, nn.Linear(64, 1)), torch.randn(512, 64), "SGD")


def _swish(broken: str) -> str:
    """The technique of the tests with one method that fails; without a name its file cannot be imported."""
    if not broken:
        return "import not_there"
    fails = (
        f"def _fails(*_):\n    raise KeyError('of the technique')\nSwishAgain.{broken} = _fails\n"
    )
    return f"{SWISH.read_text()}\n{fails}"


class Swish(nn.Module):
    """What the dropped technique knows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x) * x


class TestIsolated:
    def test_what_a_part_raises_goes_no_further_and_is_told_once(self, capsys) -> None:
        for _ in range(2):
            with parts.isolated("rule", "TT1"):
                raise KeyError("\x1b[31mred\nline")
        told(capsys.readouterr().err, "rule TT1")
        assert [one.name for one in parts.failures("rule")] == ["TT1"]

    def test_no_escape_of_an_error_reaches_the_terminal(self, capsys) -> None:
        with parts.isolated("rule", "TT1"):
            raise ValueError("\x1b[31m" + "x" * 10**6)
        said = capsys.readouterr().err
        assert "\x1b" not in said
        assert len(said) < 2_000

    @pytest.mark.parametrize(
        "error",
        [
            *(KeyboardInterrupt(), SystemExit(3), MemoryError(), BrokenPipeError()),
            *(UsageError("for people"), torch.OutOfMemoryError("CUDA")),
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        ],
    )
    def test_what_is_no_defect_passes(self, error: BaseException) -> None:
        with pytest.raises(type(error)), parts.isolated("fix", "some"):
            raise error

    def test_everything_passes_where_that_is_asked_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(parts.DEBUG, "1")
        with pytest.raises(KeyError), parts.isolated("fix", "some"):
            raise KeyError

    def test_what_is_collected_is_not_told(self, capsys) -> None:
        with parts.collected() as found, parts.isolated("fix", "some"):
            raise KeyError
        assert [one.name for one in found] == ["some"]
        assert capsys.readouterr().err == ""
        assert not parts.failures("fix")


class TestRules:
    @pytest.mark.parametrize(
        "text",
        [
            RULE.format(code="TT199", body="return [1][7]"),
            RULE.format(code="TT199", body="yield 1 / 0"),
            "import not_there",
            "RULE = 1 +",
            "",
        ],
    )
    def test_others_go_on(self, text: str, drop: Drop, capsys) -> None:
        profile = profiles.training_step()
        before = diagnose(profile)
        drop(rules, "tt199_it_fails", text)
        assert diagnose(profile) == before
        told(capsys.readouterr().err, "rule TT199")
        assert len(all_rules()) > 20

    def test_a_live_step_is_diagnosed(self, drop: Drop, capsys) -> None:
        drop(rules, "tt199_it_fails", RULE.format(code="TT199", body="raise KeyError('x')"))
        assert diagnose_report(step(), Request(steps=1)).report.original is not None
        told(capsys.readouterr().err, "rule TT199")

    @pytest.mark.parametrize(
        ("broken", "limit", "code", "said"),
        [
            ("TT101", ("--max-syncs", "1000"), 1, "--max-syncs 1000, since TT101 failed"),
            ("TT205", ("--max-syncs", "1000"), 0, ""),
            ("TT205", ("--fail-on", "10GiB"), 1, "--fail-on 10GiB, since TT205 failed"),
            ("TT101", ("--max-peak", "10GiB"), 0, ""),
            ("TT402", ("--capture",), 1, "not known: TT402 failed"),
        ],
    )
    def test_a_gate_that_was_not_checked_is_not_passed(
        self, broken: str, limit: tuple[str, ...], code: int, said: str, break_rule, run, trial
    ) -> None:
        break_rule(broken)
        Path("train.py").write_text(TRAINS)
        ended, out, err = run("diagnose", "train.py", *limit, "--json", "--out", "out")
        assert ended == code
        told(err, f"rule {broken}")
        notes = json.loads(out)["notes"]
        assert (
            f"rule {broken} failed and was left out: IndexError: list index out of range" in notes
        )
        assert said in " ".join(notes)
        assert ("NOT CHECKED" in err) == said.startswith("--")

    def test_an_allow_list_keeps_what_a_broken_rule_would_find(
        self, break_rule, run, trial
    ) -> None:
        Path("train.py").write_text(TRAINS)
        entry = Entry(code="TT101", path="train.py", line_text="print(loss.item())", count=1)
        save_allow([entry], Path(FILE_NAME))
        kept = Path(FILE_NAME).read_text()
        break_rule("TT101")
        assert run("diagnose", "train.py", "--max-syncs", "0", "--update-allow")[0] == 1
        assert Path(FILE_NAME).read_text() == kept

    def test_a_comparison_that_was_not_checked_fails(self, break_rule, run) -> None:
        save_profile(profiles.training_step(), Path("a.json"))
        break_rule("TT205")
        assert run("compare", "a.json", "a.json")[0] == 0
        code, out, _ = run("compare", "a.json", "a.json", "--fail-on", "1GiB")
        assert code == 1
        assert "TT205 failed" in " ".join(out.split())


class TestFixes:
    @pytest.mark.parametrize(
        ("find", "found"),
        [
            ("return [1][7]", "find"),
            ("yield 1 / 0", "find"),
            ("pass", "of_forms(lambda: FIX, 'X.item()')"),
        ],
    )
    @pytest.mark.parametrize("count", [1, 70])
    def test_lint_goes_on(
        self, find: str, found: str, count: int, drop: Drop, run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for number in range(count):
            Path(f"{number}.py").write_text(READS)
        before = run("lint", ".", "--format", "concise", "--no-cache")
        drop(fixes, "it_fails", FIX.format(find=find, found=found))
        for _ in range(2):
            code, out, err = run("lint", ".", "--format", "concise")
            assert (code, out) == before[:2]
            told(err, "fix it_fails")
        code, _, err = run("lint", ".", "--unsafe-fixes")
        assert code == before[0]
        told(err, "fix it_fails")

    def test_one_that_cannot_be_imported_is_left_out(self, drop: Drop, run) -> None:
        Path("a.py").write_text(READS)
        drop(fixes, "it_fails", "import not_there")
        code, out, err = run("lint", "a.py")
        assert (code, "TT101" in out) == (1, True)
        told(err, "fix it_fails")


class TestTechniques:
    @pytest.mark.parametrize(
        "broken",
        [
            *("options", "edits", "settled", "apply", ""),
        ],
    )
    def test_a_live_step_is_fitted_without_it(
        self, broken: str, drop: Drop, monkeypatch: pytest.MonkeyPatch, capfd
    ) -> None:
        drop(techniques, "swish_again", _swish(broken))
        result = optimize_report(step(), "70%", Request(steps=1))
        told(capfd.readouterr().err, "technique swish_again")
        assert result.report.certificate is not None
        assert result.report.certificate.verdict == "BITWISE"
        assert result.plan is not None
        assert result.plan.techniques

    def test_one_that_is_pinned_ends_the_verb_and_is_no_fault_of_the_step(self, drop: Drop) -> None:
        drop(techniques, "swish_again", _swish("apply"))
        pins = {"swish_again": ("*.1",)}
        with pytest.raises(PlannedStepFailed, match=r"Sequential\.1` is pinned") as error:
            optimize_report(step(), "87%", Request(steps=1), terms=Terms(pins=pins))
        assert error.value.exit_code == 2

    def test_a_plan_of_one_that_fails_is_refused_and_the_model_unchanged(self, drop: Drop) -> None:
        work = step()
        with torchtrim.fit(work, "70%", steps=1) as fitted:
            plan = fitted.plan
        drop(techniques, "swish_again", _swish("apply"))
        one = Technique(name="swish_again", where=("Sequential.1",))
        plan = msgspec.structs.replace(plan, techniques=(*plan.techniques, one))
        with pytest.raises(PlannedStepFailed, match="swish_again raised KeyError") as error:
            torchtrim.verify(work, plan)
        assert error.value.exit_code == 2
        with pytest.raises(ApplyFailed, match="bug in torchtrim"):
            torchtrim.apply(plan, work.model, *work.optimizers)
        assert not any("forward" in vars(one) for one in work.model.modules())

    @pytest.mark.slow
    def test_a_lever_that_fails_costs_no_certified_plan(self, drop: Drop, capfd) -> None:
        drop(techniques, "swish_again", _swish("edits"))
        result = optimize_report(step(), "1%", Request(steps=1))
        told(capfd.readouterr().err, "technique swish_again")
        assert result.report.floor_bytes is not None
        assert result.report.certificate is not None
        assert result.report.levers


class TestRenderers:
    @pytest.mark.parametrize(
        ("renderer", "form", "code", "lost"),
        [
            ("html", "text", 0, "report.html"),
            ("terminal", "text", CRASHED, "text on stdout"),
            ("formats.json", "text", 0, "report.json"),
            ("formats.json", "json", CRASHED, "json on stdout"),
            ("formats.sarif", "sarif", CRASHED, "sarif on stdout"),
            ("formats.markdown", "markdown", CRASHED, "markdown on stdout"),
            ("formats.github", "github", CRASHED, "github on stdout"),
        ],
    )
    def test_other_outputs_are_there(
        self, renderer: str, form: str, code: int, lost: str, run, trial, monkeypatch
    ) -> None:
        Path("train.py").write_text(TRAINS)
        monkeypatch.setattr(f"torchtrim.report.{renderer}.render", lambda *_, **__: [][0])
        ended, out, err = run("diagnose", "train.py", "--format", form, "--out", "out")
        told(err, f"renderer {lost}")
        assert ended == code
        assert Path("out/profile.json").exists()
        for file, by in (("report.html", "html"), ("report.json", "formats.json")):
            assert Path("out", file).exists() == (by != renderer), err
        if form == "text":
            assert ("out/report.html" in out) == (renderer != "html")

    @pytest.mark.parametrize(
        "broken", ["formats.github", "formats.sarif", "formats.markdown", "html"]
    )
    def test_one_that_cannot_be_imported_costs_no_other(
        self, broken: str, run, trial, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Path("train.py").write_text(TRAINS)
        monkeypatch.setitem(sys.modules, f"torchtrim.report.{broken}", None)
        code, out, err = run("diagnose", "train.py", "--json")
        assert (code, json.loads(out)["verb"]) == (0, "diagnose")
        assert (f"report.{broken}" in err) == (broken == "html")

    def test_a_limit_that_is_passed_stays_passed(self, run, trial, monkeypatch) -> None:
        Path("train.py").write_text(TRAINS)
        monkeypatch.setattr("torchtrim.report.terminal.render", lambda *_, **__: [][0])
        assert run("diagnose", "train.py", "--max-peak", "1B")[0] == 1


@pytest.mark.slow
def test_a_script_is_fitted_and_fixed_though_a_part_of_each_kind_fails(
    drop: Drop, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("train.py").write_text(TRAINS)
    drop(techniques, "swish_again", _swish("options"))
    drop(rules, "tt199_it_fails", RULE.format(code="TT199", body="return [1][7]"))
    drop(fixes, "it_fails", FIX.format(find="return [1][7]", found="find"))
    monkeypatch.setattr("torchtrim.report.html.render", lambda *_, **__: [][0])
    words = ("--memory", "70%", "--fix", "--device", "emulated", "--steps", "1")
    code, out, err = run("optimize", "train.py", *words, "--out", "out")
    for part in ("technique swish_again", "rule TT199", "fix it_fails", "renderer report.html"):
        told(err, part)
    assert code == 0
    assert "Fits" in out
    assert load_plan(Path("out/plan.toml")).techniques
    assert json.loads(Path("out/report.json").read_text())["certificate"]["verdict"] == "BITWISE"


class TestTheCommandLine:
    @pytest.fixture
    def crash(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
        def crash(error: Exception) -> None:
            def settings(_: Path) -> None:
                raise error

            monkeypatch.setattr("torchtrim.cli.main._settings", settings)

        return crash

    def test_a_defect_is_told_in_two_lines(self, crash, run) -> None:
        crash(KeyError("some\nkey"))
        code, out, err = run("doctor")
        first, second = err.splitlines()
        assert (code, out) == (CRASHED, "")
        assert first == r"error: torchtrim failed: KeyError: 'some\nkey'."
        assert "bug in torchtrim" in second
        assert "TORCHTRIM_DEBUG=1" in second

    def test_the_traceback_is_there_where_it_is_asked_for(
        self, crash, run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(parts.DEBUG, "1")
        crash(KeyError("some"))
        code, _, err = run("doctor")
        assert code == CRASHED
        assert err.startswith("Traceback")

    def test_exhausted_memory_is_no_defect(self, crash, run) -> None:
        crash(MemoryError())
        code, _, err = run("doctor")
        assert code == CRASHED
        assert "machine ran out of memory" in err
        assert "bug" not in err
